"""A report of one or more runs in a single file: `clearhead report`, `run.report("report.html")`.

It contains the command that reproduces a run, data, configuration, model, training, learning curves, results and
mistakes on the test set, attention maps and masks. What cannot be computed, because a run has no checkpoint yet or its
data is missing, is replaced by a sentence. The figures are those of the other commands.
"""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from clearhead import __version__
from clearhead.data.batches import TTA_DESCRIPTIONS
from clearhead.inference.document import (
    Block,
    Document,
    Facts,
    Paragraph,
    Picture,
    Preformatted,
    Section,
    Table,
    check_suffix,
    save,
)
from clearhead.inference.evaluate import confusion_of, draw_confusion, draw_report, tta_of
from clearhead.inference.explain import example_at, figures_of, masks_of
from clearhead.inference.run import MAX_WORDS, Announce, ReportSource, Run
from clearhead.messages import duration, round_count
from clearhead.models.config import ModuleConfig, VisionConfig
from clearhead.models.generate import Sampling
from clearhead.models.mask_view import draw_mask, legend
from clearhead.models.shapes import block_lines, brackets, count
from clearhead.recipes import RECIPES, option_value, overrides_of, train_command
from clearhead.tasks.language import LanguageTask
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.report import Example, columns_of, format_metrics
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import flat
from clearhead.training.curves import draw_curves

PACKAGES = ("torch", "numpy", "matplotlib", "safetensors", "pillow")
MAX_SAMPLE_TOKENS = 400
"""of a generated text"""


def report(
    runs: "Run | str | Path | Sequence[Run | str | Path]",
    out: str | Path = "report.html",
    *,
    epochs: Sequence[float] = (),
    samples: Sequence[int] = (0,),
    mistakes: int = 16,
    embed: bool = False,
    announce: Announce = lambda message: None,
) -> Path:
    """Write a report of one or more runs to a .html or .md file, and return its path.

    `epochs` are windows of the learning curves; `samples` are indices of test examples whose attention is drawn;
    `mistakes` is the number of most confident mistakes. With `embed`, the figures of a .md file are part of it.
    `announce` receives a line of text before each step that takes seconds.
    """
    path = Path(out)
    check_suffix(path)
    if mistakes < 1:
        raise ValueError(f"the number of mistakes must be at least 1, got {mistakes}")
    given = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    if not given:
        raise ValueError("a report needs at least one run, got none")
    sources = named_apart([ReportSource.open(run, announce) for run in given])
    for source in sources:
        source.check_samples(samples)
    return save(compose(sources, epochs, samples, mistakes), path, embed=embed)


def named_apart(sources: Sequence[ReportSource]) -> list[ReportSource]:
    """Runs of the same name are called by their paths."""
    names = [source.name for source in sources]
    return [replace(source, name=str(source.path)) if names.count(source.name) > 1 else source for source in sources]


def compose(
    sources: Sequence[ReportSource], epochs: Sequence[float], samples: Sequence[int], mistakes: int
) -> Document:
    if len(sources) == 1:
        (source,) = sources
        sections = list(run_sections(source, epochs, samples, mistakes, level=2, prefix=""))
        introduction: list[Block] = [highlights(source), *warnings_of(source)]
        title = f"{source.name}: {source.config.recipe}"
    else:
        sections = comparison(sources, epochs)
        for number, source in enumerate(sources, 1):
            sections.append(Section(source.name, [highlights(source), *warnings_of(source)]))
            sections += run_sections(source, (), samples, mistakes, level=3, prefix=f"run{number}-")
        introduction = [runs_table(sources)]
        title = "Comparison of " + ", ".join(source.name for source in sources)
    sections.append(Section("Versions", [versions(sources)]))
    footer = f"Written by Clearhead {__version__}. This file needs no network and contains no script."
    return Document(title, sections, introduction, footer)


def comparison(sources: Sequence[ReportSource], epochs: Sequence[float]) -> list[Section]:
    """Curves of all runs, and the settings in which they differ."""
    settings = [flat(source.config.to_dict()) for source in sources]
    names = list(dict.fromkeys(name for each in settings for name in each))
    rows = [
        (name, *(option_value(each[name]) if name in each else "" for each in settings))
        for name in names
        if any(each.get(name) != settings[0].get(name) for each in settings)
    ]
    table = Table(("setting", *(source.name for source in sources)), rows, is_code=True)
    differences: Block = table if rows else Paragraph("All settings are equal.")
    return [
        Section("Learning curves", curve_blocks(sources, epochs)),
        Section("Settings that differ", [differences]),
    ]


def runs_table(sources: Sequence[ReportSource]) -> Table:
    columns = ("run", "recipe", "state", "steps", "parameters", "training time", "seed", "validation", "test")
    rows = []
    for source in sources:
        summary = source.summary
        accuracies = (summary.best_validation_accuracy, summary.test_accuracy)
        results = ["" if accuracy is None else f"{accuracy:.2%}" for accuracy in accuracies]
        sizes = (f"{summary.step:,}", f"{source.parameters:,}", duration(source.seconds))
        rows.append((source.name, source.config.recipe, summary.state, *sizes, str(source.config.seed), *results))
    return Table(columns, rows, caption="Accuracy on the validation and test set", right_aligned=columns[3:])


def versions(sources: Sequence[ReportSource]) -> Facts:
    """Of the software that wrote this report, and of PyTorch when the runs were trained."""
    facts = [("Clearhead", __version__), ("Python", platform.python_version())]
    facts += [(name, version(name)) for name in PACKAGES]
    facts.append(("system", f"{platform.system()} {platform.machine()}"))
    for source in sources:
        if source.run is not None and (trained := source.run.environment.get("torch")):
            facts.append((f"torch when {source.name} was trained", str(trained)))
    return Facts(facts)


def highlights(source: ReportSource) -> Facts:
    metrics = source.recorded_metrics
    result = [(name, value) for name, value in format_metrics(metrics).items() if name != "loss"][:2]
    items = [(f"{source.recorded_part} {name}", value) for name, value in result]
    items += [("parameters", f"{source.parameters:,}"), ("training time", duration(source.seconds))]
    items += [("steps", f"{source.summary.step:,}"), ("seed", str(source.config.seed))]
    return Facts(items, is_highlighted=True)


def warnings_of(source: ReportSource) -> Iterator[Paragraph]:
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
    source: ReportSource, epochs: Sequence[float], samples: Sequence[int], mistakes: int, *, level: int, prefix: str
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


def reproduction(source: ReportSource) -> Iterator[Block]:
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


def data_blocks(source: ReportSource) -> Iterator[Block]:
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


def configuration(source: ReportSource) -> Iterator[Block]:
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


def model_blocks(source: ReportSource) -> list[Block]:
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


def training_facts(source: ReportSource) -> Facts:
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


def curve_blocks(sources: Sequence[ReportSource], epochs: Sequence[float]) -> list[Block]:
    """All runs in one row of panels for each window; several runs also apart."""
    curves = [source.curves for source in sources if source.curves is not None]
    if not curves:
        return [Paragraph("There are no training records yet.", is_warning=True)]
    figure = draw_curves(curves, epochs, panels=len(curves) > 1)
    return [Picture("curves.png", figure, "Loss and accuracy against epochs", is_vector=True)]


def results(source: ReportSource, mistakes: int, prefix: str) -> Iterator[Block]:
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
