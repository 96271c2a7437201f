"""`clearhead.fit`: exact resume, optimizers of the user's own, callbacks, outputs and inputs of any kind, refusals."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import clearhead
from clearhead.cli.main import main
from clearhead.recipes.trial import compare
from clearhead.training.config import RunConfig
from clearhead.training.run_directory import RunDirectory

QUIET = {"quiet": True, "threads": 1}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def nadam(model):
    groups = [{"params": model.head.parameters(), "lr": 0.01}, {"params": model.encoder.parameters()}]
    return torch.optim.NAdam(groups, lr=0.003)


def fit_in_two_parts(monkeypatch, make, *args, dir, stop=7, **settings):
    """The run, and the same run stopped by an exception after a few steps and resumed."""
    clearhead.fit(make, *args, dir=f"{dir}-a", log_every=1, checkpoint_every=2, **settings, **QUIET)

    def stop_at(progress):
        if progress.step == stop:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        clearhead.fit(
            make, *args, dir=f"{dir}-b", log_every=1, checkpoint_every=2, callbacks=[stop_at], **settings, **QUIET
        )
    torch.manual_seed(99)  # a new process has another random state
    clearhead.fit(make, *args, dir=f"{dir}-b", log_every=1, checkpoint_every=2, resume=True, **settings, **QUIET)
    return compare(RunDirectory.open(f"{dir}-a").path, RunDirectory.open(f"{dir}-b").path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", sgd, nadam])
@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer, kind, net, data, tensors, monkeypatch):
    train = {"tensors": tensors, "dataset": data, "loader": DataLoader(data, batch_size=10, shuffle=True)}[kind]
    settings = {"epochs": 2, "batch_size": 10, "optimizer": optimizer, "ema": 0.9, "warmup": 3}
    assert fit_in_two_parts(monkeypatch, net, train, tensors, dir="run", **settings) == []


def test_random_augmentation_depends_on_the_step_only(net, data):
    """Not on the state of torch's generator, nor on what was loaded before."""
    from clearhead.data.custom import MapBatches, user_dataset

    batches = MapBatches(user_dataset({"train": data, "val": None, "test": None}, 0, None), 10, 0)
    torch.manual_seed(1)
    first = batches.at(3).inputs
    torch.randn(5)
    batches.at(0)
    state = torch.get_rng_state()
    assert torch.equal(batches.at(3).inputs, first)
    assert torch.equal(torch.get_rng_state(), state)
    halves = torch.cat([batches.at(3, rank, 2).inputs for rank in (0, 1)])
    assert torch.equal(halves, first)
    assert not torch.equal(batches.at(3 + batches.steps_per_epoch).inputs, first)


def test_the_module_ends_with_the_best_weights_in_eval_mode(net, tensors):
    model = net()
    result = clearhead.fit(model, tensors, tensors, test_data=tensors, epochs=2, ema=0.9, dir="run", **QUIET)
    assert not model.training
    with torch.no_grad():
        accuracy = (model(tensors[0]).argmax(1) == tensors[1]).float().mean().item()
    assert result.test is not None
    assert math.isclose(accuracy, result.test["accuracy"], rel_tol=1e-6)


def test_open_run_loads_the_same_model(net, tensors):
    model = net()
    result = clearhead.fit(model, tensors, tensors, epochs=2, dir="run", **QUIET)
    run = clearhead.open_run("run", model=net)
    assert run.step == result.best_step
    assert [record["kind"] for record in run.metrics] == ["validation", "train", "validation"][-len(run.metrics) :]
    with torch.no_grad():
        assert torch.equal(run.model(tensors[0]), model(tensors[0]))
    trace = run.look(tensors[0][:2])
    assert trace["encoder.layers.1.self_attn"].weights().shape == (2, 2, 5, 5)


def test_open_run_says_what_to_pass(net, tensors):
    clearhead.fit(net, tensors, steps=2, dir="run", **QUIET)
    with pytest.raises(ValueError, match=r"pass the model.*open_run\('run', model=Net\)"):
        clearhead.open_run("run")
    with pytest.raises(ValueError, match=r"weights of a Net with [\d,]+ parameters, got a Net with"):
        clearhead.open_run("run", model=lambda: net(width=4))
    with pytest.raises(ValueError, match=r"must be an nn\.Module"):
        clearhead.open_run("run", model=lambda: 3)
    with pytest.raises(ValueError, match=r"call run\.model"):
        clearhead.open_run("run", model=net).predict(tensors[0])
    with pytest.raises(ValueError, match=r"run\.metrics"):
        clearhead.open_run("run", model=net).evaluate()


def test_commands_that_read_runs_work(net, tensors, capsys):
    clearhead.fit(net, tensors, tensors, steps=3, dir="runs/mine", snapshots=2, **QUIET)
    assert main(["runs"]) == 0
    assert "fit" in capsys.readouterr().out
    assert main(["verify", "mine"]) == 0
    assert main(["curves", "mine"]) == 0
    assert main(["look", "mine", "--training-dynamics"]) == 0
    capsys.readouterr()
    assert main(["resume", "mine"]) == 2
    assert "--model FILE.py:NAME --data FILE.py:NAME" in capsys.readouterr().err
    assert main(["evaluate", "mine"]) == 2
    assert "model=Net" in capsys.readouterr().err
    assert main(["shapes", "runs/mine"]) == 2


def test_a_run_contains_no_code(net, tensors):
    """Only plain values that describe the module and the data."""
    clearhead.fit(net, tensors, steps=1, dir="run", optimizer=sgd, **QUIET)
    config = RunDirectory.open("run").config
    assert config["model"].keys() == {"kind", "name", "parameters", "sha256", "infinite"}
    assert config["model"]["name"] == "Net"
    assert config["data"]["source"] == "tensors 60x5x8 and 60"
    assert RunConfig.from_dict(config).to_dict() == config | {"model": config["model"] | {"infinite": ()}}
    assert config["optimizer"]["name"] == "factory"
    assert config["optimizer"]["lr"] == 0.1


def test_a_longer_run_continues(net, tensors):
    clearhead.fit(net, tensors, steps=4, dir="run", schedule="constant", log_every=1, **QUIET)
    result = clearhead.fit(net, tensors, steps=8, dir="run", schedule="constant", log_every=1, resume=True, **QUIET)
    assert result.step == 8
    clearhead.fit(net, tensors, steps=8, dir="other", schedule="constant", log_every=1, **QUIET)
    assert compare(RunDirectory.open("run").path, RunDirectory.open("other").path) == []
    with pytest.raises(ValueError, match="trained for 8 steps already, got 2"):
        clearhead.fit(net, tensors, steps=2, dir="run", schedule="constant", log_every=1, resume=True, **QUIET)


def test_a_pair_of_numpy_arrays_is_a_pair_of_tensors(net, tensors):
    clearhead.fit(net, tensors, steps=2, dir="a", log_every=1, **QUIET)
    clearhead.fit(net, (tensors[0].numpy(), tensors[1].numpy()), steps=2, dir="b", log_every=1, **QUIET)
    assert compare(RunDirectory.open("a").path, RunDirectory.open("b").path) == []


def test_other_settings_data_or_models_are_refused_on_resume(net, tensors):
    clearhead.fit(net, tensors, steps=2, dir="run", **QUIET)
    again = {"steps": 2, "dir": "run", "resume": True, **QUIET}
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        clearhead.fit(net, tensors, seed=1, **again)
    with pytest.raises(ValueError, match=r"model\.parameters was"):
        clearhead.fit(lambda: net(4), (tensors[0][..., :4], tensors[1]), **again)
    with pytest.raises(ValueError, match="data has changed: train_data"):
        clearhead.fit(net, (tensors[0] + 1, tensors[1]), **again)
    with pytest.raises(ValueError, match=r"already contains a run; pass resume=True"):
        clearhead.fit(net, tensors, steps=2, dir="run", **QUIET)


def test_callbacks_receive_each_record_and_change_nothing(net, tensors):
    seen = []

    def callback(progress):
        seen.append((progress.kind, progress.step, progress.metrics["loss"]))
        assert not progress.model.training
        progress.model.train()
        torch.randn(3)

    settings = {"epochs": 2, "batch_size": 20, "log_every": 2, "test_data": tensors, **QUIET}
    clearhead.fit(net, tensors, tensors, callbacks=[callback], dir="a", **settings)
    clearhead.fit(net, tensors, tensors, dir="b", **settings)
    assert compare(RunDirectory.open("a").path, RunDirectory.open("b").path) == []
    assert seen == [(r["kind"], r["step"], r["loss"]) for r in RunDirectory.open("a").records()]
    assert {kind for kind, _, _ in seen} == {"train", "validation", "test"}


def test_a_failing_callback_ends_the_run_with_a_checkpoint(net, tensors):
    def callback(progress):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clearhead.fit(net, tensors, steps=9, log_every=4, dir="run", callbacks=[callback], **QUIET)
    latest = RunDirectory.open("run").latest_checkpoint()
    assert latest is not None
    assert latest.step == 4


class Pairs(nn.Module):
    """Takes two keyword arguments and returns an object with `logits`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 3)

    def forward(self, ids, mask):
        return SimpleNamespace(logits=(self.embed(ids) * mask[..., None]).mean(1))


@pytest.mark.parametrize("form", ["dict of tensors", "labels", "pairs"])
def test_inputs_may_be_dicts_and_outputs_may_have_logits(form):
    ids, mask, y = torch.randint(7, (40, 4)), torch.ones(40, 4), torch.randint(3, (40,))
    data = {
        "dict of tensors": ({"ids": ids, "mask": mask}, y),
        "labels": [{"ids": ids[i], "mask": mask[i], "labels": y[i]} for i in range(40)],
        "pairs": [({"ids": ids[i], "mask": mask[i]}, int(y[i])) for i in range(40)],
    }[form]
    clearhead.fit(Pairs, data, data, steps=5, batch_size=10, grad_accum_steps=2, dir="run", log_every=1, **QUIET)
    records = RunDirectory.open("run").records()
    assert {"loss", "accuracy"} <= records[0].keys()


class Reconstruction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a, b):
        return {"sum": self.layer(a) + b}


def test_without_classes_the_loss_alone_counts(capsys):
    x = torch.randn(40, 4)
    data = [((x[i], x[i]), x[i]) for i in range(40)]

    def loss(outputs, targets):
        return F.mse_loss(outputs["sum"], targets)

    clearhead.fit(Reconstruction, data, data, loss=loss, epochs=3, batch_size=8, lr=0.01, dir="runs/a", threads=1)
    assert "accuracy" not in capsys.readouterr().out
    records = RunDirectory.open("a").records()
    assert all("accuracy" not in record for record in records)
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    assert clearhead.open_run("a", model=Reconstruction).step == min(losses, key=losses.__getitem__)
    assert main(["curves", "a"]) == 0
    assert main(["runs"]) == 0


def test_correct_and_forward_are_the_users_own():
    x = torch.randn(40, 4)

    def close(outputs, targets):
        return (outputs["sum"] - targets).abs().amax(1) < 100

    def forward(model, inputs):
        return model(inputs, torch.zeros_like(inputs))

    def loss(outputs, targets):
        return F.mse_loss(outputs["sum"], targets)

    clearhead.fit(
        Reconstruction, (x, x), loss=loss, correct=close, forward=forward, steps=2, log_every=1, dir="run", **QUIET
    )
    assert RunDirectory.open("run").records()[0]["accuracy"] == 1.0


def test_gradient_accumulation_and_the_hand_written_loop_agree(tensors):
    def make():
        return nn.Sequential(nn.Flatten(), nn.Linear(40, 3))

    settings = {
        "steps": 3,
        "batch_size": 20,
        "optimizer": sgd,
        "schedule": "constant",
        "grad_clip": 0.0,
        "log_every": 1,
    }
    models = [make(), make(), make()]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    clearhead.fit(models[0], tensors, dir="a", **settings, **QUIET)
    clearhead.fit(models[1], tensors, dir="b", grad_accum_steps=3, **settings, **QUIET)

    from clearhead.data.custom import user_batches, user_dataset

    batches = user_batches(user_dataset({"train": tensors, "val": None, "test": None}, 0, None), 20, 0, 3, 0)
    optimizer = sgd(models[2])
    for step in range(3):
        batch = batches.at(step)
        F.cross_entropy(models[2](batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for model in models[:2]:
        for a, b in zip(model.parameters(), models[2].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_snapshots_show_the_attention_of_the_users_model(net, tensors):
    clearhead.fit(net, tensors, tensors, steps=4, snapshots=3, dir="run", **QUIET)
    from clearhead.training.snapshots import read_snapshots

    steps, maps = read_snapshots(RunDirectory.open("run").path)
    assert steps == [0, 1, 2, 3, 4]
    assert maps["encoder.layers.0.self_attn"].shape == (5, 3, 2, 5, 5)


class Tied(nn.Module):
    """A language model whose output weights are those of the embedding, with an additive mask as a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, ids):
        x = self.embed(ids)
        return self.head((x @ x.mT + self.mask).softmax(-1) @ x)


def test_tied_weights_and_infinite_buffers(monkeypatch):
    ids = torch.randint(9, (40, 4))
    settings = {"epochs": 2, "batch_size": 8, "ema": 0.9, "test_data": (ids, ids)}
    assert fit_in_two_parts(monkeypatch, Tied, (ids, ids), (ids, ids), dir="run", **settings) == []
    checkpoint = RunDirectory.open("run-a").best_checkpoint()
    assert checkpoint is not None
    assert set(checkpoint.model) == {"embed.weight", "mask"}
    run = clearhead.open_run("run-a", model=Tied)
    assert run.model.head.weight is run.model.embed.weight
    assert torch.equal(run.model.head.weight, checkpoint.optimizer["ema.embed.weight"])


def test_muon_trains_the_matrices_of_blocks_only(net, tensors):
    from clearhead.training.optim import param_groups

    model = net()
    muon, _, _ = param_groups(model, "muon")
    assert {id(weight) for weight in muon} == {id(w) for w in model.encoder.layers.parameters() if w.dim() == 2}
