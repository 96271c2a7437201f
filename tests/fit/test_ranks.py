"""`fit` in several processes, replicated or sharded, equals `fit` in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.training.run_directory import RunDirectory

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, socket, sys, traceback
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel
from torch import nn
from torch.utils.data import DataLoader
import clearhead
from conftest import CLASSES, WIDTH, Augmented

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def fail(progress):
    if progress.step == 3:
        raise ZeroDivisionError

def train(name, data=None, **settings):
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # ranks that build different weights start with those of rank 0
    clearhead.fit(
        Net(), data or Augmented(57), Augmented(13, seed=1), dir=name, steps=8, batch_size=11, grad_accum_steps=2,
        ema=0.8, log_every=1, evaluate_every=4, checkpoint_every=4, threads=1, quiet=True, **settings
    )

def ranks(n, name, **settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(n):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if n > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
                                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                train(name, **settings)
                code = 0
            except ZeroDivisionError:
                code = 10
            except RuntimeError as error:
                code = 11 if "callback" in str(error) else 12
                if code == 12: traceback.print_exc()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

loader = DataLoader(Augmented(57), batch_size=11, shuffle=True, drop_last=True)
print(json.dumps({
    "sgd-1": ranks(1, "sgd-1", optimizer=sgd), "sgd-2": ranks(2, "sgd-2", optimizer=sgd),
    "sgd-sharded": ranks(2, "sgd-sharded", optimizer=sgd, shard=True),
    "muon-1": ranks(1, "muon-1", optimizer="muon"), "muon-2": ranks(2, "muon-2", optimizer="muon", shard=True),
    "loader-1": ranks(1, "loader-1", data=loader), "loader-2": ranks(2, "loader-2", data=loader),
    "fail-2": ranks(2, "fail-2", callbacks=[fail]),
}))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("many", "one"),
    [("sgd-2", "sgd-1"), ("sgd-sharded", "sgd-1"), ("muon-2", "muon-1"), ("loader-2", "loader-1")],
)
def test_losses_do_not_depend_on_the_number_of_processes(runs, many, one):
    folder, codes, errors = runs
    assert (codes[many], codes[one]) == ([0, 0], [0]), errors
    mine, theirs = (RunDirectory.open(folder / name).records() for name in (many, one))
    assert len(mine) == len(theirs) == 10
    for a, b in zip(mine, theirs, strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_all_processes_end_if_a_callback_fails(runs):
    folder, codes, errors = runs
    assert codes["fail-2"] == [10, 11], errors
    assert RunDirectory.open(folder / "fail-2").latest_checkpoint().step == 3
