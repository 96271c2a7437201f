import json
import os
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

import clearhead
from clearhead import recipes
from clearhead.cli.main import main
from clearhead.inference.run import Run
from clearhead.recipes import RECIPES, config_of, overrides_of, train_command
from clearhead.training.run_directory import RunDirectory

RUNS = ("mnist", "reverse", "odd-one-out", "sum", "repeat", "pronounce", "words", "text")
ALWAYS = ["How to reproduce this run", "Data", "Configuration", "Model", "Training", "Learning curves"]
VOID = {"meta", "img", "br", "hr"}
HOSTILE = "<script>alert(1)</script>`*|](x)"


class Page(HTMLParser):
    """Checks that tags are balanced, and collects headings, images and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.headings, self.sources, self.text = [], set(), [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attributes)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)
        if self.open and self.open[-1] != "style":
            self.text += data


def page_of(path):
    page = Page(path.read_text())
    assert "script" not in page.tags
    assert all(source.startswith(("data:image/", "#section-")) for source in page.sources)
    return page


@pytest.fixture
def at_home(trained, monkeypatch):
    """The folder in which the runs were trained, so that they find their data."""
    monkeypatch.chdir(trained.parent)
    return trained


@pytest.mark.parametrize("name", RUNS)
def test_a_report_of_each_task(at_home, tmp_path, name):
    page = page_of(Run(at_home / name).report(tmp_path / "report.html"))
    assert page.headings[: len(ALWAYS)] == ALWAYS
    assert any(heading.startswith("Results on the ") for heading in page.headings)
    assert ("Generated text" in page.headings) == (name in ("words", "text"))
    if name != "text":  # its file is gone
        assert "Attention: test example 0" in page.headings
        assert ("Attention masks" in page.headings) == (name != "mnist")
    assert ("Confusion matrix" in page.text) == (name in ("mnist", "reverse", "repeat"))
    assert f"clearhead train {Run(at_home / name).config.recipe} --name {name}" in page.text


def test_missing_data_is_announced_and_the_recorded_metrics_remain(at_home, tmp_path):
    page = page_of(Run(at_home / "text").report(tmp_path / "report.html"))
    assert "The data of this run cannot be used" in page.text
    assert "my.txt" in page.text
    assert "recorded in training" in page.text


def test_the_metrics_are_those_of_evaluate(at_home, tmp_path):
    run = Run(at_home / "mnist")
    page = page_of(run.report(tmp_path / "report.html", samples=[]))
    assert f"{run.evaluate()['accuracy']:.2%}" in page.text
    assert not [heading for heading in page.headings if heading.startswith("Attention")]


def test_equal_runs_give_equal_reports(at_home, tmp_path):
    first, second = (Run(at_home / "reverse").report(tmp_path / f"{i}.html").read_bytes() for i in range(2))
    assert first == second


def test_several_runs_are_compared(at_home, tmp_path):
    out = clearhead.report([at_home / "reverse", at_home / "sum"], tmp_path / "both.html", samples=[])
    page = page_of(out)
    assert page.headings[:3] == ["Learning curves", "Settings that differ", "reverse"]
    assert "sum" in page.headings
    assert "data.question" in page.text


def test_runs_of_the_same_name_are_called_by_their_paths(at_home, tmp_path):
    shutil.copytree(at_home / "sum", tmp_path / "other/sum")
    out = clearhead.report([at_home / "sum", tmp_path / "other/sum"], tmp_path / "both.md", samples=[])
    assert str(tmp_path / "other/sum").replace("_", r"\_") in out.read_text()


def test_markdown_figures_exist(at_home, tmp_path):
    out = clearhead.report([at_home / "reverse", at_home / "reverse"], tmp_path / "report.md")
    links = re.findall(r"\]\((report-figures/[^)]+)\)", out.read_text())
    assert len(links) == len(set(links)) > 8
    assert all((tmp_path / link).is_file() for link in links)


def test_an_unfinished_run_is_reported_as_such(at_home, tmp_path):
    run = shutil.copytree(at_home / "reverse", tmp_path / "cut")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "test"
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    page = page_of(clearhead.report(run, tmp_path / "report.html"))
    assert "This run was interrupted at step 12 of 12" in page.text
    assert "validation accuracy" in page.text


def test_a_run_without_a_checkpoint(tmp_path):
    config = config_of("reverse", {"training.steps": 30})
    RunDirectory.create(tmp_path / "new", config.to_dict())
    page = page_of(clearhead.report(tmp_path / "new", tmp_path / "report.html"))
    assert page.headings == [*ALWAYS, "Versions"]
    assert "no checkpoint yet" in page.text
    assert "no training records yet" in page.text


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_names_from_a_stranger_are_escaped(at_home, tmp_path, forge, suffix):
    run = shutil.copytree(at_home / "mnist", tmp_path / '"><img src=x onerror=alert(1)>')
    classes = [f"{HOSTILE}{i}" for i in range(10)]
    forge(
        run,
        data=lambda state: state["data"] | {"classes": classes, "files": {f"{HOSTILE}.txt": HOSTILE}},
        environment={"torch": HOSTILE, "device": "![x](http://example.org)", HOSTILE: HOSTILE},
    )
    out = clearhead.report(run, tmp_path / f"report{suffix}")
    if suffix == ".html":
        page = page_of(out)
    else:
        page = Page(MarkdownIt("commonmark").enable("table").render(out.read_text()))
        assert all(source.startswith("report-figures/") for source in page.sources)
        assert "script" not in page.tags
    assert page.text.count("<script>") >= 4


@pytest.mark.parametrize("environment", [None, [], {"torch": {"a": 1}}, {"torch": [1]}])
def test_an_invalid_environment_is_left_out(at_home, tmp_path, forge, environment):
    run = shutil.copytree(at_home / "sum", tmp_path / "forged")
    forge(run, environment=environment)
    assert Run(run).environment == {}
    page_of(clearhead.report(run, tmp_path / "report.html", samples=[]))


def test_a_recipe_of_ones_own_has_no_command(at_home, tmp_path):
    run = shutil.copytree(at_home / "sum", tmp_path / "own")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"recipe": "`my` $(own)"}))
    page = page_of(clearhead.report(run, tmp_path / "report.html", samples=[]))
    assert "started from Python" in page.text


def test_a_run_of_fit(tmp_path):
    """Its code and data are not part of the run: weights and recorded metrics are."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = (x, (x.sum(1) > 0).long())
    clearhead.fit(nn.Linear(4, 2), data, data, steps=4, batch_size=16, dir=tmp_path / "own", quiet=True)
    page = page_of(clearhead.report(tmp_path / "own", tmp_path / "a.html"))
    assert "contains no code" in page.text
    page = page_of(clearhead.open_run(tmp_path / "own", model=nn.Linear(4, 2)).report(tmp_path / "b.html"))
    assert {"Model", "Learning curves", "Results on the validation set"} <= set(page.headings)
    assert "Linear: 10 parameters" in page.text
    assert "weight[2,4]8" in page.text


CHANGES = {
    "training.steps": 7,
    "training.precision": "bf16",
    "optimizer.lr": 1e-05,
    "model.bias": False,
    "model.beta": -1.5,
    "data.limit": 99,
    "seed": 3,
    "snapshots.inputs": 2,
}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("text", "folder")])
@pytest.mark.parametrize("changes", [{}, {"training.epochs": 3}, CHANGES])
def test_the_printed_command_trains_the_same_config(recipe, changes, monkeypatch, capsys):
    config = config_of(recipe, changes)
    overrides = overrides_of(config)
    assert overrides is not None
    if not changes:
        assert overrides == {}
    assert config_of(recipe, overrides) == config
    called = {}

    def train(config, name, **options):
        called.update(config=config, name=name)
        return type("Result", (), {"exit_code": 0})

    monkeypatch.setattr(recipes, "train", train)
    command = train_command(config, overrides, "my $name", {"world_size": 1})
    words = shlex.split(command.replace("\\\n", " "))
    assert main(words[1:]) == 0, capsys.readouterr().err
    assert called == {"config": config, "name": "my $name"}


def test_the_command_for_several_processes():
    config = config_of("reverse")
    command = train_command(config, {}, "two", {"world_size": 2, "sharded": True})
    assert command == "torchrun --nproc-per-node 2 -m clearhead train reverse --name two --shard"


def test_overrides_of_the_users_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("To be, or not to be.\n" * 100)
    config = config_of("text", {"data.file": "my.txt", "data.length": 16})
    assert overrides_of(config) == {"data.file": "my.txt", "data.length": 16}
    os.remove("my.txt")
    assert overrides_of(config) == {"data.file": "my.txt", "data.length": 16}


def test_command_line(at_home, tmp_path, capsys):
    out = tmp_path / "deep/report.html"
    assert (
        main(["report", str(at_home / "reverse"), "--samples", "1", "4", "--epochs", "1", "2", "--out", str(out)]) == 0
    )
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert "Evaluating 10,000 test examples" in captured.err
    assert {"Attention: test example 1", "Attention: test example 4"} <= set(page_of(out).headings)
    assert "replaced" not in captured.err
    assert main(["report", str(at_home / "reverse"), "--samples", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert f"replaced the existing file {out}\n" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "report.pdf"], "a report is saved as .html or .md, got 'report.pdf'; try report.html"),
        (["--samples", "10000"], "has examples from 0 to 9999, got 10000"),
        (["--samples", "-1"], "has examples from 0 to 9999, got -1"),
        (["--mistakes", "0"], "must be at least 1, got 0"),
        (["--epochs", "0"], "must be a number of epochs"),
    ],
)
def test_invalid_options_are_one_line(at_home, capsys, options, message):
    assert main(["report", str(at_home / "reverse"), *options]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("clearhead: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not Path("report.html").exists()
