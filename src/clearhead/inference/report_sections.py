"""The sections of a report about one run, from the command that reproduces it to its attention masks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clearhead.data.batches import TTA_DESCRIPTIONS
from clearhead.data.dataset import Dataset, Examples
from clearhead.inference.document import Block, Facts, Paragraph, Picture, Preformatted, Section, Table
from clearhead.inference.evaluate import confusion_of, draw_confusion, draw_report, predict_examples, tta_of
from clearhead.inference.explain import example_at, figures_of, masks_of
from clearhead.inference.run import Run
from clearhead.messages import duration, round_count
from clearhead.models.config import ModuleConfig, VisionConfig
from clearhead.models.generate import Sampling
from clearhead.models.mask_view import draw_mask, legend
from clearhead.models.shapes import Shapes, block_lines, brackets, count, shapes
from clearhead.recipes.launch import RECIPES, option_value, overrides_of, train_command
from clearhead.tasks.language import LanguageTask
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.pronunciation import BEAM, report_words
from clearhead.tasks.report import Example, Outputs, Report, columns_of, format_metrics
from clearhead.tasks.task import PartName
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig, flat
from clearhead.training.curves import Curves, draw_curves, read_curves
from clearhead.training.run_directory import RunDirectory
from clearhead.training.run_summary import RunSummary, summarize

Announce = Callable[[str], None]
MAX_WORDS = 1000
"""words of `pronounce` that are evaluated, because a beam search over all of them takes minutes"""
MAX_SAMPLE_TOKENS = 400
"""of a generated text"""
MAIN_METRICS = ("word_error_rate", "exact_match", "accuracy", "loss")
"""those that are recorded and shown first"""


@dataclass(frozen=True, eq=False)
class Source:
    """A run and its data, as far as they are available."""

    name: str
    path: Path
    config: RunConfig
    summary: RunSummary
    records: list[dict[str, Any]]
    run: Run | None
    """None before the first checkpoint, and for a model of the user whose code was not passed"""
    data: Dataset | None
    problem: str
    """why there is no data"""
    announce: Announce

    @classmethod
    def open(cls, run: Run | str | Path, announce: Announce) -> "Source":
        directory = RunDirectory.open(run.path if isinstance(run, Run) else run)
        path, summary = directory.path, summarize(directory.path)
        announce(f"Reading {path} ...")
        config = RunConfig.from_dict(directory.config)
        can_open = bool(saved_steps(path)) and not isinstance(config.model, ModuleConfig)
        opened = run if isinstance(run, Run) else Run(path) if can_open else None
        config = config if opened is None else opened.config
        data, problem = None, ""
        try:
            if opened is not None:
                opened.check_data_files()
            data = config.task.load(config.seed)
        except (OSError, ValueError, LookupError) as error:
            problem = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error.args[0])
        return cls(path.resolve().name, path, config, summary, directory.records(), opened, data, problem, announce)

    @property
    def part(self) -> PartName:
        """The test set; the validation set of a run that has no test set."""
        return "test" if self.data is None or len(self.data.test) else "validation"

    @property
    def examples(self) -> Examples | None:
        """None if there are none, or if they cannot be read."""
        found = None if self.data is None else getattr(self.data, self.part)
        return found if found is not None and len(found) else None

    def check_samples(self, samples: Sequence[int]) -> None:
        if self.run is None or self.examples is None:
            return
        if wrong := [index for index in samples if not 0 <= index < len(self.examples)]:
            last = len(self.examples) - 1
            raise LookupError(f"the {self.part} set of {self.path} has examples from 0 to {last}, got {wrong[0]}")

    @cached_property
    def shapes(self) -> Shapes:
        """Of a model of ours."""
        return shapes(self.config.model)

    @property
    def parameters(self) -> int:
        model = self.config.model
        return model.parameters if isinstance(model, ModuleConfig) else self.shapes.parameters

    @cached_property
    def curves(self) -> Curves | None:
        try:
            return replace(read_curves(self.path), name=self.name)
        except ValueError:
            return None

    @property
    def seconds(self) -> float:
        return max((record.get("seconds", 0.0) for record in self.records), default=0.0)

    @cached_property
    def outputs(self) -> Outputs | None:
        """Predictions for all examples; None if there are none, and for `pronounce`, which has its own evaluation."""
        if self.run is None or self.data is None or self.examples is None or isinstance(self.config.task, Pronounce):
            return None
        self.announce(f"Evaluating {len(self.examples):,} {self.part} examples of {self.path} ...")
        return predict_examples(self.run, self.part, self.examples, self.data.normalize)

    def predictions(self, n: int) -> Report | None:
        """The metrics, the first predictions and the most confident mistakes."""
        if self.run is None or self.examples is None:
            return None
        if isinstance(self.config.task, Pronounce):
            text = f"Pronouncing {self.part} words of {self.path} ..."
            return report_words(
                self.config.task, self.run, self.part, n, BEAM, lambda: self.announce(text), max_words=MAX_WORDS
            )
        return self.run.task.report(self.run, self.part, n, lambda: self.outputs, lambda: None)  # type: ignore[arg-type, return-value]

    @property
    def recorded_part(self) -> PartName:
        """The part of the data that `recorded_metrics` are about."""
        return "test" if any(record.get("kind") == "test" for record in self.records) else "validation"

    @property
    def recorded_metrics(self) -> dict[str, Any]:
        """Those of the last test record, or of the best validation record; {} before the first evaluation."""
        tests = [record for record in self.records if record.get("kind") == "test"]
        others = [record for record in self.records if record.get("kind") == "validation"]
        last = tests[-1:] or sorted(others, key=lambda record: record.get("accuracy", 0.0))[-1:]
        return {name: last[0][name] for name in MAIN_METRICS if name in last[0]} if last else {}


def highlights(source: Source) -> Facts:
    metrics = source.recorded_metrics
    result = [(name, value) for name, value in format_metrics(metrics).items() if name != "loss"][:2]
    items = [(f"{source.recorded_part} {name}", value) for name, value in result]
    items += [("parameters", f"{source.parameters:,}"), ("training time", duration(source.seconds))]
    items += [("steps", f"{source.summary.step:,}"), ("seed", str(source.config.seed))]
    return Facts(items, is_highlighted=True)


def warnings_of(source: Source) -> Iterator[Paragraph]:
    if source.run is None and not saved_steps(source.path):
        yield Paragraph("This run has no checkpoint yet: there are no results.", is_warning=True)
    elif source.run is None:
        yield Paragraph("A run of clearhead.fit contains no code: open it in Python, and call run.report(...).")
    elif state := source.summary.unfinished:
        text = f"This run {state}. The results are those of its best checkpoint so far, of step {source.run.step:,}."
        yield Paragraph(text, is_warning=True)
    if source.problem:
        yield Paragraph(f"The data of this run cannot be used: {source.problem}", is_warning=True)


def run_sections(
    source: Source, epochs: Sequence[float], samples: Sequence[int], mistakes: int, *, level: int, prefix: str
) -> Iterator[Section]:
    """The sections of one run. `prefix` distinguishes the file names of its figures."""
    yield Section("How to reproduce this run", list(reproduction(source)), level)
    yield Section("Data", list(data_blocks(source)), level)
    yield Section("Configuration", list(configuration(source)), level)
    yield Section("Model", model_blocks(source), level)
    yield Section("Training", [training_facts(source)], level)
    if level == 2:
        yield Section("Learning curves", curve_blocks([source], epochs), level)
    if source.recorded_metrics:
        is_measured = source.run is not None and source.examples is not None
        part = source.part if is_measured else source.recorded_part
        yield Section(f"Results on the {part} set", list(results(source, mistakes, prefix)), level)
    if source.run is None:
        return
    if isinstance(source.config.task, LanguageTask):
        yield Section("Generated text", [generated(source.run, source.config.task)], level)
    if source.examples is None:
        return
    examples = {index: example_at(source.run, source.examples, index) for index in samples}
    for index, example in examples.items():
        source.announce(f"Drawing the attention for {source.part} example {index} of {source.path} ...")
        title = f"Attention: {source.part} example {index}"
        yield Section(title, list(attention(source.run, example, f"{prefix}example{index}-")), level)
    if examples and not isinstance(source.config.model, VisionConfig):
        yield Section("Attention masks", list(masks(source.run, next(iter(examples.values())), prefix)), level)


def reproduction(source: Source) -> Iterator[Block]:
    overrides = overrides_of(source.config)
    environment = {} if source.run is None else source.run.environment
    if overrides is None:
        yield Paragraph("This run was started from Python with its own configuration, which is listed below.")
    else:
        yield Preformatted(train_command(source.config, overrides, source.path.resolve().name, environment), "bash")
    yield Paragraph(
        f"The seed is {source.config.seed}. With the same version of PyTorch, number of threads and kind of processor, "
        "the results are the same bit for bit; otherwise their last digits differ."
    )


def data_blocks(source: Source) -> Iterator[Block]:
    task, data = source.config.task, source.data
    facts = [("data set", f"{task.name}: {task.description}"), ("origin", task.origin)]
    if data is not None:
        sizes = {"training": data.train, "validation": data.validation, "test": data.test}
        facts += [(f"{name} examples", f"{len(part):,}") for name, part in sizes.items()]
        facts += [("classes", f"{len(data.classes):,}")] * bool(data.classes)
        facts += [("tokens in the vocabulary", f"{len(data.vocab):,}")] * bool(data.vocab)
        facts += [("files skipped, because they could not be read", f"{len(data.skipped):,}")] * bool(data.skipped)
    yield Facts(facts)
    digests = {} if source.run is None else dict(source.run.data_files)
    digests |= task.published_digests()
    if digests:
        yield Table(("file", "SHA-256"), list(digests.items()), is_code=True)
    elif task.origin == "generated":
        yield Paragraph("The examples are generated: the seed determines them.")


def configuration(source: Source) -> Iterator[Block]:
    """What differs from the recipe, then everything."""
    settings = flat(source.config.to_dict())
    if source.config.recipe in RECIPES:
        default = flat(RECIPES[source.config.recipe].make().to_dict())
        changed = [name for name in settings if settings[name] != default.get(name)]
        changes = [(name, option_value(settings[name]), option_value(default.get(name))) for name in changed]
        if changes:
            columns = ("setting", "value", f"default of {source.config.recipe}")
            yield Table(columns, changes, caption="Settings that differ from the recipe", is_code=True)
        else:
            yield Paragraph(f"All settings are the defaults of the recipe {source.config.recipe}.")
    names = list(settings)
    half = -(-len(names) // 2)
    rows = [
        tuple(text for name in pair for text in (name, option_value(settings.get(name, ""))))
        for pair in zip(names[:half], [*names[half:], ""][:half], strict=True)
    ]
    yield Table(("setting", "value", "setting", "value"), rows, caption="All settings", is_code=True)


def model_blocks(source: Source) -> list[Block]:
    model = source.config.model
    if isinstance(model, ModuleConfig):
        named = [] if source.run is None else source.run.model.named_parameters()
        weights = [(name, brackets(tuple(weight.shape)), count(weight.numel())) for name, weight in named]
        names = ("parameter", "shape", "number of values")
        table = [Table(names, weights, right_aligned=names[2:], is_code=True)] if weights else []
        return [Paragraph(f"{model.name}: {model.parameters:,} parameters"), *table]
    summary = source.shapes
    columns = ("tensor", "operation", "shape (rows)", "shape (columns)", "parameters", "multiply-adds")
    rows: list[tuple[str, ...]] = []
    block = ""
    for line in block_lines(summary.tensors, every_block=False):
        if line.style and not line.parameters:  # the heading of a block
            block = line.label
            continue
        name = f"{block}.{line.label.strip()}" if line.label.startswith(" ") else line.label
        sizes = (brackets(line.rows), brackets(line.columns), count(line.parameters), count(line.multiply_adds))
        rows.append((name, line.operation, *sizes))
    totals = f"{summary.parameters:,} parameters, {summary.multiply_adds:,} multiply-adds for one example."
    text = "Shapes are given with tokens as rows, [batch, tokens, width], and as columns, [width, tokens]."
    return [
        Paragraph(f"{type(model).__name__.removesuffix('Config')} model: {totals} {text}"),
        Table(columns, rows, right_aligned=columns[4:], is_code=True),
    ]


def training_facts(source: Source) -> Facts:
    training, summary = source.config.training, source.summary
    end = f" of {summary.total_steps:,}" if summary.total_steps else ""
    epochs = source.curves.length if source.curves else 0.0
    facts = [
        ("state", summary.state),
        ("steps", f"{summary.step:,}{end} ({round_count(epochs)} epochs), batch size {training.batch_size:,}"),
        ("training time", f"{duration(source.seconds)}, validation included"),
    ]
    if source.run is not None:
        facts.append(("best checkpoint", f"step {source.run.step:,}, chosen on the validation set"))
        facts += [
            (name.replace("_", " "), option_value(value).replace("true", "yes").replace("false", "no"))
            for name, value in source.run.environment.items()
        ]
    return Facts(facts)


def curve_blocks(sources: Sequence[Source], epochs: Sequence[float]) -> list[Block]:
    """All runs in one row of panels for each window; several runs also apart."""
    curves = [source.curves for source in sources if source.curves is not None]
    if not curves:
        return [Paragraph("There are no training records yet.", is_warning=True)]
    figure = draw_curves(curves, epochs, panels=len(curves) > 1)
    return [Picture("curves.png", figure, "Loss and accuracy against epochs", is_vector=True)]


def results(source: Source, mistakes: int, prefix: str) -> Iterator[Block]:
    predictions, run = source.predictions(mistakes), source.run
    if predictions is None or run is None:
        yield Facts(list(format_metrics(source.recorded_metrics).items()))
        yield Paragraph("These metrics were recorded in training.")
        return
    tta = TTA_DESCRIPTIONS[tta_of(run, source.part)]
    yield Facts([*format_metrics(predictions.metrics).items(), *([("test-time augmentation", tta)] if tta else [])])
    if isinstance(run.task, Pronounce) and predictions.total == MAX_WORDS:
        text = f"Measured on the first {MAX_WORDS:,} words. All words: clearhead evaluate {source.name}"
        yield Paragraph(text)
    if source.outputs is not None and run.task.objective.has_classes:
        figure = draw_confusion(confusion_of(run, source.outputs), run.classes)
        yield Picture(
            f"{prefix}confusion.svg", figure, "Confusion matrix: actual classes as rows, predicted as columns"
        )
    first, worst = predictions.titles(source.part)
    if run.task.input_option == "image":
        figure = draw_report(run, predictions, source.part, source.examples)
        yield Picture(f"{prefix}predictions.png", figure, f"{first}. {worst}")
        return
    for title, rows in ((worst, predictions.mistakes), (first, predictions.first)):
        if rows:
            columns = columns_of(rows)
            cells = list(zip(*columns.values(), strict=True))
            yield Table(list(columns), cells, caption=title, right_aligned=("index", "probability"), is_code=True)
    if not predictions.mistakes:
        yield Paragraph(f"All {predictions.total:,} {predictions.unit} are correct.")


def generated(run: Run, task: LanguageTask) -> Preformatted:
    texts = run.sample(n=task.num_samples, max_new_tokens=MAX_SAMPLE_TOKENS, strategy=Sampling(seed=0))
    return Preformatted("\n".join(texts))


def attention(run: Run, example: Example, prefix: str) -> Iterator[Block]:
    yield Paragraph(example.sentence)
    for name, title, figure in figures_of(run, example):
        yield Picture(prefix + name, figure, title[:1].upper() + title[1:])


def masks(run: Run, example: Example, prefix: str) -> Iterator[Picture]:
    for number, (layers, view) in enumerate(masks_of(run, example), 1):
        yield Picture(f"{prefix}mask{number}.png", draw_mask(view), layers, legend(view))
