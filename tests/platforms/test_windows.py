"""Windows, by imitation (see windows.py): these tests have not been run on a real one."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.files import from_json
from clearhead.recipes import train
from clearhead.training.checkpoint import checkpoint_path, load

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src/clearhead"
SOURCES = sorted(PACKAGE.rglob("*.py"))
START = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import os, pathlib, subprocess, tempfile, threading
import windows
locks = pathlib.Path(sys.argv[1])
"""
TORCH = """
import torch, torch.distributed, torch.optim, torch.utils._python_dispatch, safetensors.torch, numpy, rich.console
import PIL.Image, matplotlib.backends.backend_agg, matplotlib.figure, matplotlib.pyplot, rich.progress, rich.table
torch.set_num_threads(1)
"""
SMALL = {
    "training.steps": 12,
    "training.checkpoint_every": 4,
    "training.threads": 1,
    "training.precision": "float32",
    "training.ema": 0.5,
    "data.limit": 400,
    "data.validation": 50,
    "model.patch_embed": "patch",
    "model.patch_size": 14,
    "model.width": 16,
    "model.depth": 1,
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the imitation reads /proc")


def run_on_windows(code: str, folder: Path, *arguments: object, torch: bool = False) -> subprocess.Popen:
    (folder / "locks").mkdir(exist_ok=True)
    script = START + (TORCH if torch else "") + "windows.install(locks)\n" + code
    command = [sys.executable, "-c", script, str(folder / "locks"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def output_on_windows(code: str, folder: Path, *arguments: object, torch: bool = False) -> str:
    child = run_on_windows(code, folder, *arguments, torch=torch)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0, out
    return out


COMMANDS = """
from clearhead.cli.main import main
from clearhead.training.config import RunConfig
import json

options = [word for name, value in json.loads(sys.argv[2]).items()
           for word in ("--" + name.replace("_", "-"), str(value))]
def command(*argv, code=0):
    found = main(list(argv))
    assert found == code, (argv, found)

command("train", "mnist", "--name", "mine", *options, "--training.steps", "6", "--snapshots.inputs", "2")
command("resume", "mine", "--steps", "12")
command("runs")
command("verify", "mine")
command("curves", "mine")
command("evaluate", "mine")
command("confusion", "mine")
command("predict", "mine", "digit.png")
command("look", "mine", "--sample", "3")
command("look", "mine", "--training-dynamics")
command("doctor", "mymodel.py:MyModel", code=1)  # it has a fault: no mask for padding
command("lab", "temperature")
"""
MODEL = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.slow
def test_ordinary_use(tmp_path, monkeypatch):
    """Train, resume and everything after it; the weights are those of a run on this system."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28)).save("digit.png")
    (tmp_path / "mymodel.py").write_text(MODEL)
    print(output_on_windows(COMMANDS, tmp_path, json.dumps(SMALL), torch=True))
    train("mnist", "here", changes=SMALL, quiet=True)
    there, here = (load(checkpoint_path(tmp_path / "runs" / name, 12)) for name in ("mine", "here"))
    assert there.model.keys() == here.model.keys()
    assert all(there.model[name].equal(here.model[name]) for name in here.model)


HOLD = """
from clearhead.training.run_directory import RunDirectory
with RunDirectory.open("mine").lock():
    print("locked", os.getpid(), flush=True)
    sys.stdin.readline()
"""
TRY = """
import json
from clearhead.training.run_directory import RunDirectory, is_locked
before = is_locked(pathlib.Path("mine"))
try:
    with RunDirectory.open("mine").lock() as run:
        found = ["acquired", is_locked(run.path)]
except OSError as error:
    found = [error.strerror, is_locked(pathlib.Path("mine"))]
print(json.dumps([before, *found, is_locked(pathlib.Path("mine"))]))
"""


def test_one_process_owns_a_run(tmp_path):
    """Another one is told who does, until the owner ends or is killed."""
    from clearhead.training.run_directory import RunDirectory

    RunDirectory.create(tmp_path / "mine", {"recipe": "reverse"})
    assert from_json(output_on_windows(TRY, tmp_path).encode()) == [False, "acquired", True, False]
    for end in ("ends", "is killed"):
        owner = run_on_windows(HOLD, tmp_path)
        word, number = owner.stdout.readline().split()
        assert word == "locked"
        before, problem, *after = from_json(output_on_windows(TRY, tmp_path).encode())
        assert f"locked by process {number}" in problem
        assert before
        assert after == [True, True]
        if end == "ends":
            owner.communicate("\n", timeout=60)
            assert owner.returncode == 0
        else:
            owner.kill()
            owner.communicate(timeout=60)
        assert from_json(output_on_windows(TRY, tmp_path).encode()) == [False, "acquired", True, False]


FILES = """
import errno
from clearhead import files
from pathlib import Path

Path("file").write_bytes(b"old")
files.write_atomic(Path("file"), b"new")
assert Path("file").read_bytes() == b"new"

with open("file", "rb") as reader:  # a reader only delays the writer
    threading.Timer(0.2, reader.close).start()
    files.write_atomic(Path("file"), b"newer")
assert files.read_regular(Path("file")) == b"newer"
with open("file", "rb") as reader:
    try:
        files.write_atomic(Path("file"), b"newest")
    except PermissionError as error:
        assert error.filename == "file"
    else:
        raise AssertionError("an open file was replaced")
assert files.read_regular(Path("file")) == b"newer"
assert not list(Path().glob(".*"))

os.symlink("file", "link")
try:
    files.read_regular(Path("link"))
except files.UnsafeFileError as error:
    assert "a symbolic link" in str(error)
else:
    raise AssertionError("a link was followed")
assert files.open_regular(Path("link"), os.O_RDONLY, follow=True)
try:
    files.read_regular(Path())
except IsADirectoryError:
    pass
files.fsync_folder(Path())

os.mkdir("empty")
from clearhead.training.run_directory import RunDirectory
RunDirectory.create("empty", {})
assert Path("empty/config.json").exists()
"""


def test_files(tmp_path):
    """Atomic writes beside readers, links without O_NOFOLLOW, and a run in a folder that exists and is empty."""
    output_on_windows(FILES, tmp_path)


def test_a_junction_is_a_link():
    """os.lstat reports it as a folder; its reparse tag tells."""
    import os
    from types import SimpleNamespace

    from clearhead.files import JUNCTION, unsafe_type

    folder = os.lstat(HERE)
    junction = SimpleNamespace(st_mode=folder.st_mode, st_nlink=1, st_reparse_tag=JUNCTION)
    assert unsafe_type(folder, for_writing=True) == ""
    assert unsafe_type(junction, for_writing=False) == "a junction"


def test_no_unix_only_name_is_used_unguarded():
    """Imports of Unix-only modules stand inside functions; the attributes below are behind a test that they exist."""
    sys.path.insert(0, str(HERE))
    try:
        import windows
    finally:
        sys.path.remove(str(HERE))
    guarded = {
        "training/progress.py": {"os.sched_getaffinity", "os.getloadavg"},
        "training/checkpoint.py": {"os.sysconf"},
        "data/folder.py": {"os.sysconf"},
    }
    missing = {f"os.{name}" for name in windows.OS_ATTRIBUTES}
    missing |= {f"signal.{name}" for name in (*windows.SIGNALS, *windows.SIGNAL_FUNCTIONS)}
    assert len(SOURCES) > 100
    for path in SOURCES:
        tree = ast.parse(path.read_bytes())
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert used & missing == guarded.get(path.relative_to(PACKAGE).as_posix(), set()), path
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {*windows.MODULES}, path
