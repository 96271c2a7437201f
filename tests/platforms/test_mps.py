"""MPS, the GPU of a Mac, by imitation (see device.py): these tests have not been run on a Mac."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from clearhead.models.generate import Sampling
from clearhead.recipes import train
from clearhead.training import distributed
from clearhead.training.checkpoint import checkpoint_path, load
from clearhead.training.context import faster_precision
from clearhead.training.distributed import choose_device, preserved_rng

HERE = Path(__file__).parent
IMAGES = {"model.patch_size": 14, "model.width": 16, "model.depth": 1, "model.patch_embed": "patch", "data.limit": 300}
TINY = {"model.width": 16, "model.depth": 1, "model.num_heads": 2, "model.mlp_dim": 32, "training.batch_size": 32}
SMALL = {
    "training.steps": 4,
    "training.checkpoint_every": 2,
    "training.threads": 1,
    "data.validation": 50,
    "training.precision": "float32",
    "snapshots.inputs": 2,
}


@pytest.mark.parametrize(
    ("cuda", "has_mps", "processes", "expected"),
    [(True, True, 1, "cuda"), (False, True, 1, "mps"), (False, True, 2, "cpu"), (False, False, 1, "cpu")],
)
def test_device_is_cuda_then_mps_then_cpu(monkeypatch, cuda, has_mps, processes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    monkeypatch.delenv(distributed.DEVICE, raising=False)
    assert choose_device(processes).type == expected
    monkeypatch.setenv(distributed.DEVICE, "cpu")
    assert choose_device(processes).type == "cpu"


def test_named_device_must_be_available(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv(distributed.DEVICE, "mps")
    with pytest.raises(ValueError, match=r"CLEARHEAD_DEVICE must be available here \(cpu\), got 'mps'"):
        choose_device()


def test_the_random_state_of_mps_is_preserved(monkeypatch):
    state = [torch.tensor([7])]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: state[0])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda value: state.append(value))
    with preserved_rng():
        state[0] = torch.tensor([8])
    assert len(state) == 2
    assert state[-1] == 7


IMITATION = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import device, json, torch
device.install()
torch.set_num_threads(1)
"""


def on_imitated_device(code: str, folder: Path, *arguments: object) -> None:
    command = [sys.executable, "-c", IMITATION + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_imitation_refuses_what_mps_refuses(tmp_path):
    on_imitated_device(
        """
        jobs = (
            lambda: torch.zeros(2, dtype=torch.float64).to("nodouble"),
            lambda: torch.zeros(2, dtype=torch.float64, device="nodouble"),
            lambda: torch.zeros(2, device="nodouble").double(),
            lambda: torch.zeros(2, device="nodouble").to("cpu", torch.float64),
            lambda: torch.zeros(2, device="nodouble") + torch.zeros(2),
        )
        with device.ImitatedDevice():
            for i, job in enumerate(jobs):
                try:
                    job()
                except (TypeError, AssertionError):
                    continue
                raise AssertionError(i)

            layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
            layer(x).square().sum().backward()
            moved = torch.nn.Linear(3, 2).to("nodouble")
            moved.load_state_dict(layer.state_dict())
            moved(x.to("nodouble")).square().sum().backward()
            assert moved.weight.device.type == "nodouble"
            torch.testing.assert_close(moved.weight.grad.cpu(), layer.weight.grad)
        """,
        tmp_path,
    )


TRAIN = """
from clearhead.recipes import resume, train
from clearhead.training import distributed, evaluation

distributed.choose_device = lambda *_: torch.device("nodouble", 0)
evaluation.has_float64 = lambda device: device.type != "nodouble"
torch.inference_mode = torch.no_grad  # inside the former, the imitation does not see which device .to() names
recipe, changes = json.loads(sys.argv[1])
with device.ImitatedDevice() as mode:
    train(recipe, "mine", changes=changes | {"training.steps": 2}, quiet=True)
    resume("mine", steps=4, quiet=True)
assert mode.n_operations > 100, mode.n_operations
"""


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("mnist", IMAGES | {"training.ema": 0.5}),
        (
            "mnist-plain",
            IMAGES | {"training.grad_accum_steps": 2, "optimizer.name": "muon", "data.augmentation.mixup": 0.2},
        ),
        ("pronounce-fast", TINY | {"data.limit": 300}),
        ("words", TINY | {"data.limit": 300}),
    ],
)
def test_training_and_resuming_use_no_float64_on_the_device(tmp_path, monkeypatch, recipe, changes):
    """Without dropout, and with random numbers of the CPU, the weights are those of a run on the CPU."""
    monkeypatch.chdir(tmp_path)
    changes = SMALL | changes
    on_imitated_device(TRAIN, tmp_path, json.dumps([recipe, changes]))
    train(recipe, "cpu", changes=changes, quiet=True)
    found, expected = (load(checkpoint_path(Path("runs") / name, 4)) for name in ("mine", "cpu"))
    assert found.state["environment"]["device"] == "nodouble"
    assert found.model.keys() == expected.model.keys()
    for name in expected.model:
        torch.testing.assert_close(found.model[name], expected.model[name], rtol=1e-3, atol=1e-4)
    assert found.state["train_state"]["best_score"] == pytest.approx(
        expected.state["train_state"]["best_score"], rel=1e-3
    )


def test_the_random_state_of_mps_is_in_checkpoints(monkeypatch):
    from types import SimpleNamespace

    from clearhead.training.state import restore_rng, rng_states

    restored = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    states = rng_states(torch.device("mps"))
    assert states.keys() == {"", ".mps"}
    ctx = SimpleNamespace(ranks=SimpleNamespace(rank=0, device=torch.device("mps")), config=SimpleNamespace(seed=0))
    with preserved_rng():
        restore_rng(ctx, {f"rank0{suffix}": state for suffix, state in states.items()}, step=1)
    assert restored == [torch.tensor([7])]


def test_precision_auto_is_float32_on_mps():
    precision, reason = faster_precision(lambda precision: pytest.fail("timed"), torch.device("mps"))
    assert precision == "float32"
    assert "MPS" in reason


def test_sampling_uses_no_float64_on_mps(monkeypatch):
    """A tensor that says that it is on MPS gets probabilities in float32."""
    logits = torch.randn(3, 7)
    strategy = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    expected = strategy.distribution(logits)
    assert expected.dtype == torch.float64

    class OnMPS(torch.Tensor):
        device = torch.device("mps")

    found = strategy.distribution(logits.as_subclass(OnMPS))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected.float())
