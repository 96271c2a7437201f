"""Three small training runs (a vision transformer with augmentation, an encoder-decoder and a language model, all with
dropout), and the comparison of a run that was interrupted with a reference run without faults."""

import importlib
import itertools
import os
import pkgutil
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.campaign.processes import ChildResult, run
from benchmarks.soak import differences

import clearhead

if TYPE_CHECKING:
    from benchmarks.campaign.shards import Failure

KINDS = ("vit", "encoder-decoder", "language-model")
STEPS = 24
HANG_SECONDS = 300.0
"""seconds of CPU time, or without progress, after which a command counts as a hang"""
SHARED = {
    "seed": 1,
    "training.steps": STEPS,
    "training.checkpoint-every": 4,
    "training.evaluate-every": 8,
    "training.log-every": 1,
    "training.batch-size": 8,
    "training.threads": 1,
    "training.precision": "float32",
    "training.ema": 0.9,
    "data.validation": 10,
    "model.width": 16,
    "model.depth": 1,
    "model.num-heads": 2,
    "model.mlp_dim": 32,
    "model.dropout": 0.1,
}

CACHES = {"CLEARHEAD_CACHE": "", "MPLCONFIGDIR": "matplotlib", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""caches of this package, of matplotlib and of torch: writing to them does not count as a write outside"""


class Workspace:
    """A folder for one shard, with data and reference runs. Each reference run is trained when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.data = self.folder / "data"
        self.cache = self.folder / "cache"
        self.seconds: dict[str, float] = {}
        """duration of each reference run"""
        self.data.mkdir(exist_ok=True)
        self.cache.mkdir(exist_ok=True)
        (self.cache / "matplotlib").mkdir(exist_ok=True)
        os.environ |= {name: str(self.cache / folder) for name, folder in CACHES.items()}
        preload()
        make_dictionary(self.data / "dictionary.txt")
        make_words(self.data / "words.txt")
        make_pictures(self.data / "pictures")

    def train(self, kind: str, name: str = "run", **changes: object) -> list[str]:
        """The command that trains runs/NAME of this kind."""
        about = {
            "vit": {
                "data.folder": self.data / "pictures",
                "data.image-size": 16,
                "model.patch-size": 8,
                "model.patch_embed": "patch",
                "data.augmentation.crop": 2,
            },
            "encoder-decoder": {"data.train-file": self.data / "dictionary.txt"},
            "language-model": {"data.file": self.data / "words.txt"},
        }[kind]
        recipe = {"vit": "folder", "encoder-decoder": "pronounce-fast", "language-model": "words"}[kind]
        options = SHARED | about | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
        pairs = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        return ["train", recipe, "--name", name, *pairs]

    def reference_run(self, kind: str, label: str = "", **changes: object) -> Path:
        """The folder of a run of this kind without faults. Runs with changed settings have a label."""
        home = self.folder / f"reference-{kind}{label}"
        if not home.exists():
            home.mkdir()
            began = time.monotonic()
            ended = run(self.train(kind, **changes), home, HANG_SECONDS, may_write=[self.cache])
            if ended.code != 0:
                raise RuntimeError(
                    f"the reference run of {kind} ended with code {ended.code}: {ended.err.strip()[-300:]}"
                )
            self.seconds[kind + label] = time.monotonic() - began
        return home / "runs" / "run"

    def new(self, name: str) -> Path:
        """An empty folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def copy(self, run_folder: Path, case: Path) -> Path:
        """A copy of a run, as runs/run of a case."""
        (case / "runs").mkdir(exist_ok=True)
        return Path(shutil.copytree(run_folder, case / "runs" / "run"))


def preload() -> None:
    """Import in the parent what every child would otherwise import again, which takes a second each time."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def check_exit(ended: ChildResult, allowed: Sequence[int], what: str) -> "list[Failure]":
    """Every command must end, with an allowed exit code, without a traceback, and without a write outside."""
    from benchmarks.campaign.shards import Failure

    found = []
    if ended.hang:
        found.append(Failure("hang", f"{what}: {ended.hang}"))
    elif ended.code == 5 or ended.code == 99 or "Traceback" in ended.err:
        found.append(Failure("exit 5", f"{what} ended with code {ended.code}: {last_line(ended.err)}"))
    elif ended.code not in allowed:
        found.append(Failure("wrong exit code", f"{what} ended with code {ended.code}: {last_line(ended.err)}"))
    if ended.outside:
        more = f" and {len(ended.outside) - 1} more" if len(ended.outside) > 1 else ""
        found.append(Failure("write outside", f"{what}: {ended.outside[0]}{more}"))
    return found


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def check_saved(run_folder: Path, saved: int, *, may_report: bool = False) -> "list[Failure]":
    """The newest checkpoint must be the last one that was reported as saved, or newer, and none may be damaged."""
    from benchmarks.campaign.shards import Failure

    from clearhead.training.run_directory import RunDirectory

    if not run_folder.exists():
        return [Failure("lost save", f"step {saved} was saved, and there is no run")] if saved else []
    reports: list[str] = []
    try:
        newest = RunDirectory.open(run_folder, reports.append).latest_checkpoint()
    except (OSError, ValueError, LookupError) as error:
        return [Failure("lost save", f"step {saved} was saved, and the run cannot be opened: {error}")]
    found = []
    if (step := newest.step if newest else 0) < saved:
        found.append(Failure("lost save", f"step {saved} was saved, and the newest checkpoint is that of step {step}"))
    if reports and not may_report:
        found.append(Failure("damaged checkpoint", "; ".join(reports)))
    return found


def resume_and_compare(
    workspace: Workspace, kind: str, case: Path, saved: int, *, label: str = "", train: Sequence[str] = ()
) -> "list[Failure]":
    """Resume runs/run of a case to its end (or train it, if it does not exist yet), and compare all bits."""
    from benchmarks.campaign.shards import Failure

    reference, ours = workspace.reference_run(kind, label), case / "runs" / "run"
    found = check_saved(ours, saved)
    argv = ["resume", "runs/run"] if ours.exists() else list(train) or workspace.train(kind)
    ended = run(argv, case, HANG_SECONDS, may_write=[workspace.cache], name="resumed")
    found += check_exit(ended, [0], "resume")
    if ended.code == 0:
        found += [Failure("silent difference", line) for line in differences(ours, reference)]
    return found


def make_dictionary(path: Path) -> None:
    """Words over four letters, each of which has its own phone."""
    if not path.exists():
        phones = dict(zip("abcd", ("AE", "B", "K", "D"), strict=True))
        words = ["".join(letters[: 2 + i % 3]) for i, letters in enumerate(itertools.product("abcd", repeat=4))]
        lines = [f"{word} {' '.join(phones[letter] for letter in word)}\n" for word in dict.fromkeys(words)]
        path.write_text("".join(lines))


def make_words(path: Path) -> None:
    if not path.exists():
        letters = "abcdefghij"
        path.write_text("".join(f"{a}{b}{a}\n" for a in letters for b in letters))


def make_pictures(folder: Path) -> None:
    """Twenty-four noisy images of each of two colors."""
    if folder.exists():
        return
    from PIL import Image

    noise = random.Random(0)
    for channel, name in enumerate(("red", "green")):
        (folder / name).mkdir(parents=True)
        for i in range(24):
            pixels = bytearray(noise.randrange(90) for _ in range(16 * 16 * 3))
            pixels[channel::3] = bytes(value + 160 for value in pixels[channel::3])
            Image.frombytes("RGB", (16, 16), bytes(pixels)).save(folder / name / f"{i}.png")
