"""A report of one or more runs in a single file: `clearhead report`, `run.report("report.html")`.

It contains the command that reproduces a run, data, configuration, model, training, learning curves, results and
mistakes on the test set, attention maps and masks. What cannot be computed, because a run has no checkpoint yet or its
data is missing, is replaced by a sentence. The figures are those of the other commands.
"""

import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from clearhead import __version__
from clearhead.inference.document import Block, Document, Facts, Paragraph, Section, Table, check_suffix, save
from clearhead.inference.report_sections import Announce, Source, curve_blocks, highlights, run_sections, warnings_of
from clearhead.inference.run import Run
from clearhead.messages import duration
from clearhead.recipes.launch import option_value
from clearhead.training.config import flat

PACKAGES = ("torch", "numpy", "matplotlib", "safetensors", "pillow")


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
    sources = named_apart([Source.open(run, announce) for run in given])
    for source in sources:
        source.check_samples(samples)
    return save(compose(sources, epochs, samples, mistakes), path, embed=embed)


def named_apart(sources: Sequence[Source]) -> list[Source]:
    """Runs of the same name are called by their paths."""
    names = [source.name for source in sources]
    return [replace(source, name=str(source.path)) if names.count(source.name) > 1 else source for source in sources]


def compose(sources: Sequence[Source], epochs: Sequence[float], samples: Sequence[int], mistakes: int) -> Document:
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


def comparison(sources: Sequence[Source], epochs: Sequence[float]) -> list[Section]:
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


def runs_table(sources: Sequence[Source]) -> Table:
    columns = ("run", "recipe", "state", "steps", "parameters", "training time", "seed", "validation", "test")
    rows = []
    for source in sources:
        summary = source.summary
        accuracies = (summary.best_validation_accuracy, summary.test_accuracy)
        results = ["" if accuracy is None else f"{accuracy:.2%}" for accuracy in accuracies]
        sizes = (f"{summary.step:,}", f"{source.parameters:,}", duration(source.seconds))
        rows.append((source.name, source.config.recipe, summary.state, *sizes, str(source.config.seed), *results))
    return Table(columns, rows, caption="Accuracy on the validation and test set", right_aligned=columns[3:])


def versions(sources: Sequence[Source]) -> Facts:
    """Of the software that wrote this report, and of PyTorch when the runs were trained."""
    facts = [("Clearhead", __version__), ("Python", platform.python_version())]
    facts += [(name, version(name)) for name in PACKAGES]
    facts.append(("system", f"{platform.system()} {platform.machine()}"))
    for source in sources:
        if source.run is not None and (trained := source.run.environment.get("torch")):
            facts.append((f"torch when {source.name} was trained", str(trained)))
    return Facts(facts)
