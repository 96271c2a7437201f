"""`clearhead.fit`: what it announces, what it refuses, and its command line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import clearhead
from clearhead.cli.main import main
from clearhead.training.config import OptimizerConfig
from clearhead.training.run_directory import RunDirectory

QUIET = {"quiet": True, "threads": 1}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


@pytest.mark.filterwarnings("ignore")
def test_an_iterable_is_announced_and_read_in_order(net, data, tensors, capsys):
    batches = [(tensors[0][i : i + 10], tensors[1][i : i + 10]) for i in range(0, 60, 10)]

    class Stream:
        def __iter__(self):
            return iter(batches)

    clearhead.fit(net, Stream(), steps=8, dir="a", **QUIET)
    assert "iterable of batches" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"iterator, which can be read only once, and ended after 6 batches"):
        clearhead.fit(net, iter(batches), steps=8, dir="b", **QUIET)
    with pytest.raises(ValueError, match="without a length; pass steps="):
        clearhead.fit(net, iter(batches), epochs=1, dir="c", **QUIET)
    clearhead.fit(net, iter(batches), steps=6, dir="d", log_every=1, **QUIET)
    assert RunDirectory.open("d").config["training"]["batch_size"] == 10


def test_data_that_is_not_reproducible_is_announced(net, data, capsys):
    import random

    class Jittered(Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, i):
            return data.x[i] * random.random(), data.y[i]

    clearhead.fit(net, Jittered(), steps=1, dir="a", **QUIET)
    assert "will not be exact" in capsys.readouterr().err
    clearhead.fit(net, data, steps=1, dir="b", **QUIET)
    assert capsys.readouterr().err == ""


def test_mistakes_are_refused_before_a_run_is_created(net, data, tensors, folder):
    x, y = tensors

    class Examples(IterableDataset):
        def __iter__(self):
            return iter([])

    class Frozen(nn.Linear):
        def __init__(self):
            super().__init__(8, 3)
            self.requires_grad_(False)

    for expected, model, train, settings in (
        ("train_data must be a pair of tensors", net, "abc", {}),
        ("train_data must be a pair of tensors", net, x, {}),
        ("train_data must be a pair of tensors", net, None, {}),
        ("got a tuple of 2: list and Tensor", net, (x.tolist(), y), {}),
        ("same first dimension", net, (x, y[:3]), {}),
        (r"must be a pair \(inputs, targets\)", net, [x[0], x[1], x[2]], {"batch_size": 2}),
        (r"DataLoader\(train_data", net, Examples(), {}),
        ("from 1 to the 60 training examples, got 100", net, tensors, {"batch_size": 100}),
        ("must be an nn.Module", lambda: 3, tensors, {}),
        ("no parameter to train", Frozen, tensors, {}),
        ("lazy parameters", lambda: nn.LazyLinear(3), tensors, {}),
        ("the default loss is the cross-entropy", net, (x, y.float()), {}),
        (
            r"without dimensions, the mean over the batch, got shape \(2,\)",
            net,
            tensors,
            {"loss": lambda o, t: o[:, 0]},
        ),
        ("'adamw', 'muon' or a function", net, tensors, {"optimizer": "adam"}),
        ("function from the model to an optimizer", net, tensors, {"optimizer": torch.optim.SGD}),
        ("lr is set by the function", net, tensors, {"optimizer": sgd, "lr": 0.1}),
        ("lr is a field of the OptimizerConfig", net, tensors, {"optimizer": OptimizerConfig(), "lr": 0.1}),
        ("to a torch.optim.Optimizer, got a NoneType", net, tensors, {"optimizer": lambda model: None}),
        ("parameters of the model that it was given", net, tensors, {"optimizer": lambda model: sgd(net())}),
        ("set one of steps and epochs", net, tensors, {"steps": 0}),
        ("collate has no effect on a pair of tensors", net, tensors, {"collate": list}),
    ):
        with pytest.raises(ValueError, match=expected):
            clearhead.fit(model, train, **({"steps": 1, "dir": "run"} | settings | QUIET))
    assert not (folder / "run").exists()


def test_a_default_folder_is_named_after_the_class(net, tensors):
    for _ in range(2):
        clearhead.fit(net, tensors, steps=1, **QUIET)
    assert {path.name for path in RunDirectory.open("net").path.parent.iterdir()} == {"net", "net-2"}


def test_early_stopping_by_the_loss(tensors):
    x = tensors[0].mean(1)
    result = clearhead.fit(
        lambda: nn.Linear(8, 3),
        (x, x[:, :3]),
        (x, -x[:, :3]),
        loss=F.mse_loss,
        epochs=20,
        patience=2,
        dir="run",
        **QUIET,
    )
    assert result.reason == "patience"


def test_the_file_of_a_command_gives_model_data_and_loss(folder, capsys):
    (folder / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4, 1)\n"
        "def data():\n    x = torch.randn(40, 4)\n    return (x, x.sum(1, keepdim=True)), (x[:9], x[:9, :1])\n"
        "def loss(outputs, targets):\n    return (outputs - targets).square().mean()\n"
    )
    parts = ["--model", "mine.py:Net", "--data", "mine.py:data", "--loss", "mine.py:loss"]
    short = ["--epochs", "2", "--batch-size", "8", "--name", "a", "--optimizer.lr", "0.1", "--threads", "1"]
    assert main(["train", *parts, *short]) == 0
    assert main(["resume", "a", *parts, "--epochs", "3"]) == 0
    assert RunDirectory.open("a").records()[-1]["step"] == 15
    capsys.readouterr()
    for argv, expected in (
        (["train", "--model", "mine.py:Nat", "--data", "mine.py:data", "--epochs", "1"], "did you mean Net?"),
        (["train", "--model", "mine.py:Net", "--epochs", "1"], "--data FILE.py:NAME is missing"),
        (["train", *parts, "--epoch", "1"], "did you mean --epochs?"),
        (["train", "--model", "mine.py:Net", "--data", "mine.py:data", "--epochs", "1"], "the default loss"),
        (["resume", "a", "--model", "mine.py:Net"], "--data FILE.py:NAME is missing"),
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert expected in err
        assert err.count("\n") == 1
    assert not (folder / "runs" / "net").exists()


@pytest.mark.parametrize(("keyword", "ours"), [("epoch", "epochs"), ("learning_rate", "lr"), ("output_dir", "dir")])
def test_unknown_keywords_suggest_the_closest_one(net, tensors, keyword, ours):
    with pytest.raises(TypeError, match=rf"fit got an unexpected keyword argument '{keyword}'; did you mean {ours}\?"):
        clearhead.fit(net, tensors, **{keyword: 3})


def test_a_resumed_run_names_its_checkpoint(net, tensors, capsys):
    settings = {"batch_size": 8, "checkpoint_every": 2, "threads": 1, "dir": "runs/named"}
    clearhead.fit(net, tensors, steps=2, **settings)
    assert "resuming" not in capsys.readouterr().out
    clearhead.fit(net, tensors, steps=4, resume=True, **settings)
    assert "resuming   from the checkpoint of step 2\n" in capsys.readouterr().out
