"""Three small training runs to disturb: a vision transformer, an encoder-decoder and a language model, each with
dropout, the first with augmentation too; and the comparison of a disturbed run with the undisturbed one."""

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

from benchmarks.campaign.processes import Ended, run
from benchmarks.soak import differences

import clearhead

if TYPE_CHECKING:
    from benchmarks.campaign.shards import Failure

KINDS = ("vit", "encoder-decoder", "language-model")
STEPS = 24
PATIENCE = 300.0
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
"""where this package, matplotlib and torch keep what they may lose: not "outside" in the sense of the campaign"""


class Stage:
    """A folder for one shard: data to learn from, and undisturbed runs, each made when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.data = self.folder / "data"
        self.cache = self.folder / "cache"
        self.seconds: dict[str, float] = {}
        """how long each undisturbed run took"""
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

    def undisturbed(self, kind: str, label: str = "", **changes: object) -> Path:
        """The folder of a run of this kind that nothing has disturbed; a label for one with changed settings."""
        home = self.folder / f"undisturbed-{kind}{label}"
        if not home.exists():
            home.mkdir()
            began = time.monotonic()
            ended = run(self.train(kind, **changes), home, PATIENCE, may_write=[self.cache])
            if ended.code != 0:
                raise RuntimeError(f"the undisturbed {kind} ended with code {ended.code}: {ended.err.strip()[-300:]}")
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
    """Imports here what every child would import again, each time for a second."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def check_ended(ended: Ended, allowed: Sequence[int], what: str) -> "list[Failure]":
    """What every command must keep to: a known exit code, no traceback, no write outside, an end."""
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
    """The newest checkpoint is the last that was reported as saved, or a newer one; none is damaged."""
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


def finish_and_compare(
    stage: Stage, kind: str, case: Path, saved: int, *, label: str = "", train: Sequence[str] = ()
) -> "list[Failure]":
    """Resumes runs/run of a case to its end (or trains it, if there is none yet), and compares all bits."""
    from benchmarks.campaign.shards import Failure

    undisturbed, ours = stage.undisturbed(kind, label), case / "runs" / "run"
    found = check_saved(ours, saved)
    argv = ["resume", "runs/run"] if ours.exists() else list(train) or stage.train(kind)
    ended = run(argv, case, PATIENCE, may_write=[stage.cache], name="resumed")
    found += check_ended(ended, [0], "resume")
    if ended.code == 0:
        found += [Failure("silent difference", line) for line in differences(ours, undisturbed)]
    return found


def make_dictionary(path: Path) -> None:
    """Words of four letters, each of which has a phone of its own."""
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
    """Twenty-four noisy pictures of each of two colours."""
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
