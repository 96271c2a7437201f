from pathlib import Path

import pytest

from clearhead.inference import explain
from clearhead.inference.explain import plot_results, run_demo
from clearhead.inference.run import Run
from clearhead.recipes import config_of


def test_figures_of_a_run(trained):
    figures = plot_results(Run(trained / "mnist"))
    names = [path.name for path, _ in figures]
    assert names[:3] == ["curves.png", "confusion.png", "predictions.png"]
    assert {"wall.png", "patches.png", "aggregates.png"} <= set(names[3:])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path, _ in figures)


def test_demo_resumes_its_run(tmp_path, monkeypatch):
    asked = []

    def train(config, name, **options):
        asked.append((config, name, options))
        return type("TrainResult", (), {"reason": "stopped"})

    monkeypatch.setattr("clearhead.recipes.train", train)
    monkeypatch.setattr(explain, "plot_results", lambda run: pytest.fail("there is nothing to draw"))
    assert run_demo()[1] == []
    assert asked == [(config_of("mnist"), "demo", {"resume": True})]


def test_demo_with_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = {"model.patch_size": 14, "model.width": 8, "model.patch_embed": "patch", "model.depth": 1, "data.limit": 300}
    monkeypatch.setattr(explain, "config_of", lambda name, changes: config_of(name, tiny | changes))
    announced = []
    outcome, figures = run_demo(steps=2, announce=lambda: announced.append("drawing"))
    assert announced == ["drawing"]
    assert outcome.step == 2
    assert outcome.test["accuracy"] > 0
    assert all(Path(path).is_file() for path, _ in figures)


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="steps must be a positive integer, got 0"):
        run_demo(steps=0)
