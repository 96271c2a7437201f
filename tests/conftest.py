"""Shared fixtures. Each test process uses one thread, because test processes run in parallel.

Property-based tests are derandomized; `make soak` uses random examples (pytest --hypothesis-profile=other).

CLEARHEAD_TEST_PROCESSOR=avx2 simulates a processor without AVX-512 and bf16, =bf16 one that reports bf16 arithmetic:
no result may depend on the difference. `make test-other-processor` selects the kind that this machine does not have.
"""

import errno
import itertools
import os
from collections.abc import Callable

import pytest

PROCESSOR = os.environ.get("CLEARHEAD_TEST_PROCESSOR", "")
if PROCESSOR == "avx2":  # before torch is imported
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("other", deadline=None)
settings.load_profile("same")
torch.set_num_threads(1)
if PROCESSOR:
    torch.cpu._is_avx512_bf16_supported = lambda: PROCESSOR == "bf16"
    torch.cpu._is_amx_tile_supported = lambda: False


class Killed(BaseException):
    """Simulates a killed process: nothing after the failing call is executed."""


class Faults:
    """Fault injection: makes one system call fail, as a full disk, missing permissions or a kill would."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")
    """every system call with which the package changes the file system"""
    NEVER = 10**9
    FULL = staticmethod(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    KILLED = Killed

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, self.trace = 0, []
        self.at: int | None = None
        self.once = True
        self.error: Callable[[], BaseException] = self.FULL
        monkeypatch.setattr(os, "fsync", lambda file: None)  # slow, and no test loses power
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, call):
        def counted_call(*args, **kwargs):
            if self.at is None:
                return call(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            if number == self.at or (number > self.at and not self.once):
                raise self.error()
            self.trace.append((name, *args))
            return call(*args, **kwargs)

        return counted_call

    def during(self, job, at: int, once: bool = True, error: Callable[[], BaseException] = FULL):
        """Runs `job` with call number `at` failing, and all later calls unless `once`.

        Returns the exception or None, and whether the job reached that call.
        """
        self.count, self.trace, self.at, self.once, self.error = 0, [], at, once, error
        try:
            job()
            return None, self.count > at
        except (OSError, Killed) as failure:
            return failure, self.count > at
        finally:
            self.at = None


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Small, barely trained runs of several recipes, shared by all tests: do not modify them."""
    from clearhead.recipes import train

    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        few = {"data.validation": 50, "training.threads": 1, "training.log_every": 5, "training.precision": "float32"}
        images = {"model.patch_size": 14, "model.width": 16, "model.depth": 1, "model.patch_embed": "patch"}
        runs = {
            "reverse": {"training.steps": 12, "data.limit": 500},
            "mnist": {"training.steps": 12, "training.ema": 0.5, "data.limit": 400, **images},
            "odd-one-out": {
                "training.steps": 3,
                "data.limit": 200,
                "model.width": 8,
                "model.depth": 1,
                "data.set_size": 4,
            },
        }
        for name, changes in runs.items():
            train(name, name, changes=few | changes, quiet=True)
        for question in ("sum", "repeat"):
            about = {"data.question": question, "training.steps": 3, "data.limit": 400, "model.width": 8}
            train("digits", question, changes=few | about, quiet=True)
        (home / "my.dict").write_text(made_up_dictionary())
        (home / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
        small = {
            "model.width": 16,
            "model.depth": 1,
            "model.num_heads": 2,
            "model.mlp_dim": 32,
            "training.batch_size": 32,
        }
        brief = few | small | {"data.validation": 20, "training.evaluate_every": 20}
        spoken = {"data.train_file": "my.dict", "data.test_file": "my.test", "training.steps": 20}
        (home / "my.test").write_text("cab K AE B\ncab(2) K AE D\nbad B AE D\n")
        train("pronounce-fast", "pronounce", changes=brief | spoken, quiet=True)
        letters = "abcdefghijklmnopqrstuvwxyz"
        (home / "my.words").write_text("".join(f"{a}{b}{a}\n" for a in letters for b in letters))
        train("words", "words", changes=brief | {"data.file": "my.words", "training.steps": 10}, quiet=True)
        train("text", "text", changes=brief | {"data.file": "my.txt", "training.steps": 10}, quiet=True)
        os.rename(home / "my.txt", home / "gone.txt")  # inference needs no data files
    return home / "runs"


def made_up_dictionary() -> str:
    """Words over four letters, each of which maps to one phone."""
    phones = dict(zip("abcd", ("AE", "B", "K", "D"), strict=True))
    words = ["".join(letters[: 2 + i % 3]) for i, letters in enumerate(itertools.product("abcd", repeat=4))]
    return "".join(f"{word} {' '.join(phones[letter] for letter in word)}\n" for word in dict.fromkeys(words))


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder of red, green and blue images of different sizes, with a temporary cache."""
    import numpy as np
    from PIL import Image

    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(10):
            pixels = noise.integers(0, 90, (20 + i, 24, 3), dtype=np.uint8)
            pixels[..., channel] += 160
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{i}.png")
    return tmp_path / "pictures"


@pytest.fixture(scope="session")
def forge():
    """forge(run, config=...) replaces entries of every state.json of a run and updates the manifest.

    The result is what an untrusted source could send.
    """
    from clearhead.files import from_json, to_json
    from clearhead.training.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE, manifest

    def forge(run, **values):
        for folder in (run / "checkpoints").glob("step-*"):
            state = from_json((folder / STATE).read_bytes())
            state["state"] |= {
                name: value(state["state"]) if callable(value) else value for name, value in values.items()
            }
            (folder / STATE).write_bytes(to_json(state, indent=1))
            contents = {name: (folder / name).read_bytes() for name in (MODEL, OPTIMIZER, STATE)}
            (folder / MANIFEST).write_bytes(manifest(contents))

    return forge
