from pathlib import Path

from clearhead.cli.main import COMMANDS, main
from clearhead.training.loop import TrainResult

PICTURES = [(Path(f"runs/demo/figures/{name}.png"), f"about {name}") for name in ("curves", "look/aggregates")]


def test_demo_prints_accuracy_figures_and_next_commands(capsys, monkeypatch):
    outcome = TrainResult("finished", 9, 9, {"accuracy": 0.9876, "seconds": 61.2})
    monkeypatch.setattr("clearhead.cli.train.run_demo", lambda steps: (outcome, PICTURES))
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "Test accuracy: 98.76% on 10,000 digits after 61 s of training." in out
    assert all(str(path) in out and what in out for path, what in PICTURES)
    assert "\nNext:\n  clearhead predict runs/demo" in out
    assert max(map(len, out.splitlines())) <= 90
    suggested = [line.split() for line in out[out.index("\nNext:\n") :].splitlines() if "clearhead " in line]
    assert len(suggested) > 3
    assert all(words[0] == "clearhead" and words[1] in COMMANDS for words in suggested)


def test_a_stopped_demo_exits_with_code_3(monkeypatch, capsys):
    monkeypatch.setattr("clearhead.cli.train.run_demo", lambda steps: (TrainResult("stopped", 9, 0, None), []))
    assert main(["demo"]) == 3
    assert "Figures:" not in capsys.readouterr().out
