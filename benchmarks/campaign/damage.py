"""Flipped bits in the files of a run, and non-finite numbers."""

import contextlib
import hashlib
import io
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Child, Prepare, Report, run
from benchmarks.campaign.runs import HANG_SECONDS, KINDS, STEPS, Workspace, check_exit, last_line, resume_and_compare
from benchmarks.campaign.shards import Failure, Shard

MODEL = "vit"
VERIFY = "verify"
"""the command that checks every file of a run against its manifest"""


class Flips(Shard):
    """One bit of one file of a run is flipped, and then the commands that read the file are run.

    Nothing may differ silently: the answer is the one of the intact run, or the command says on stderr that something
    is wrong, or it refuses. A record or a snapshot of attention, which no answer depends on, may also be found out by
    `clearhead verify`. The first flip of every fifth batch is followed by a resume of an unfinished run as well.
    """

    name = "flips"
    what = "one bit of a run's files is flipped"
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(("checkpoint", "config", "metrics", "best", "snapshots"), 2000)
    small = 40
    batch = 20
    resume_every = 5

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        from benchmarks.campaign.kills import stop_at

        home = workspace.new("stopped")
        train = workspace.train(MODEL, snapshots__inputs=2, snapshots__every=4)
        run(train, home, HANG_SECONDS, prepare=stop_at(STEPS // 2), may_write=[workspace.cache])
        self.stopped = home / "runs" / "run"
        self.finished = workspace.reference_run(MODEL, "-snapshots", snapshots__inputs=2, snapshots__every=4)
        self.intact: dict[tuple[str, ...], Any] = {}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        """A batch of flips, all in one child."""
        flips = [self.choose_flip(kind, number + i) for i in range(self.size)]
        self.workspace.copy(self.stopped, folder)
        child = Child([], folder, job=lambda: self.flip_all(kind, flips), may_write=[self.workspace.cache])
        ended = child.wait(HANG_SECONDS)
        found = [
            Failure(*line.removeprefix("failure ").split(": ", 1))
            for line in ended.out.splitlines()
            if line.startswith("failure ")
        ]
        found += check_exit(ended, [0], f"{len(flips)} flips in {kind}") if not found else []
        if number // self.batch % self.resume_every == 0:
            found += self.resume_flipped(kind, flips[0], folder)
        return found

    def choose_flip(self, kind: str, number: int) -> tuple[str, int]:
        """The file, below the run, and the bit of case `number`."""
        rng = random.Random(f"{self.seed} flip {kind} {number}")
        patterns = {
            "checkpoint": "checkpoints/step-*/*",
            "config": "config.json",
            "metrics": "metrics.jsonl",
            "best": "best.json",
            "snapshots": "snapshots/*",
        }
        path = rng.choice(sorted(self.stopped.glob(patterns[kind])))
        return str(path.relative_to(self.stopped)), rng.randrange(8 * path.stat().st_size)

    def flip_all(self, kind: str, flips: Sequence[tuple[str, int]]) -> int:
        """Runs in the child: flip a bit, run the commands, restore the file."""
        run_folder = Path("runs/run")
        for command in commands_for(kind):
            self.intact[tuple(command)] = run_command(command)
        for name, bit in flips:
            intact = (run_folder / name).read_bytes()
            (run_folder / name).write_bytes(flipped(intact, bit))
            for failure in self.check_flip(kind, f"bit {bit} of {name}"):
                os.write(1, f"failure {failure.kind}: {failure.what!r}\n".encode())
            restore(self.stopped, run_folder, name, intact)
        return 0

    def check_flip(self, kind: str, where: str) -> list[Failure]:
        found, is_noticed, differs = [], False, []
        for command in commands_for(kind):
            code, out, err = run_command(command)
            _, good, usual = self.intact[tuple(command)]
            err = "" if err == usual else err  # such as the warning that the run is unfinished
            if code not in (0, 1, 2) or "Traceback" in err:
                found.append(Failure("exit 5", f"{where}: {command[0]} ended with code {code}: {last_line(err)}"))
            is_noticed = is_noticed or code != 0 or bool(err.strip())
            if out != good and code == 0 and not err.strip():
                differs.append(command[0])
        if differs and kind in ("metrics", "snapshots") and not is_noticed:
            is_noticed = has_verify() and run_command([VERIFY, "runs/run"])[0] != 0
        if differs and not is_noticed:
            found.append(Failure("silent difference", f"{where}: a different output of {', '.join(differs)}"))
        return found

    def resume_flipped(self, kind: str, flip: tuple[str, int], folder: Path) -> list[Failure]:
        """A resume is refused, reports something, or ends with the same weights as the reference run."""
        name, bit = flip
        shutil.rmtree(folder / "runs")
        copy = self.workspace.copy(self.stopped, folder)
        (copy / name).write_bytes(flipped((copy / name).read_bytes(), bit))
        ended = run(["resume", "runs/run"], folder, HANG_SECONDS, may_write=[self.workspace.cache])
        found = check_exit(ended, [0, 1, 2], f"resume after bit {bit} of {name} was flipped")
        if ended.code == 0 and not ended.err.strip():
            newest = f"checkpoints/step-{STEPS:08d}/model.safetensors"
            if digest(copy / newest) != digest(self.finished / newest):
                found.append(Failure("silent difference", f"bit {bit} of {name}: different weights after a resume"))
        return found


def commands_for(kind: str) -> list[list[str]]:
    """The commands that read a file of this kind."""
    return {
        "metrics": [["curves", "runs/run", "--csv", "-"]],
        "snapshots": [["look", "runs/run", "--training-dynamics", "--out", "figures"]],
    }.get(kind, [["predict", "runs/run", "picture.png", "--json"]])


def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    from clearhead.cli.main import main

    if command[0] == "look":
        return read_maps()
    if not Path("picture.png").exists():
        from PIL import Image

        Image.new("RGB", (16, 16), (200, 40, 90)).save("picture.png")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(command))
    return code, out.getvalue(), err.getvalue()


def read_maps() -> tuple[int, str, str]:
    """The numbers that `look --training-dynamics` draws, without drawing, which would take hours for 2,000 flips."""
    from clearhead.training.snapshots import read_snapshots

    try:
        steps, maps = read_snapshots(Path("runs/run"))
    except (ValueError, LookupError, OSError) as error:
        if isinstance(error, KeyError | IndexError | UnicodeError):
            return 5, "", f"{type(error).__name__}: {error}"
        return 2, "", str(error)
    except Exception as error:
        return 5, "", f"{type(error).__name__}: {error}"
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in maps.items()}
    return 0, f"{steps} {sorted(digests.items())}", ""


def has_verify() -> bool:
    from clearhead.cli.main import COMMANDS

    return VERIFY in COMMANDS


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def restore(original: Path, run_folder: Path, name: str, content: bytes) -> None:
    """Undo a flip. A command may have renamed the damaged checkpoint."""
    if (run_folder / name).parent.is_dir():
        (run_folder / name).write_bytes(content)
    else:
        shutil.rmtree(run_folder)
        shutil.copytree(original, run_folder)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"


class NonFinite(Shard):
    """NaN or Inf in a weight, a gradient or the optimizer's state at one step."""

    name = "non-finite"
    what = "NaN or Inf in a weight, a gradient or the optimizer's state"
    counts: ClassVar[Mapping[str, int]] = {"weight": 17, "gradient": 17, "optimizer": 16}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = KINDS[number % len(KINDS)]
        step, value = rng.randrange(1, STEPS + 1), rng.choice((float("nan"), float("inf"), -float("inf")))
        self.workspace.reference_run(model)
        prepare = inject(kind, step, value, rng.random())
        ended = run(
            self.workspace.train(model), folder, HANG_SECONDS, prepare=prepare, may_write=[self.workspace.cache]
        )
        what = f"{value} in the {kind} at step {step}"
        found = check_exit(ended, [4], what)
        found += [Failure("non-finite checkpoint", f"{what}: {line}") for line in not_finite(folder / "runs" / "run")]
        rest = resume_and_compare(self.workspace, model, folder, ended.saved)
        return found + [Failure(f.kind, f"{what}: {f.what}") for f in rest]


def inject(kind: str, step: int, value: float, where: float) -> Prepare:
    """Set one number to `value`: in a weight or a gradient just before this step, in the optimizer's state after it."""

    def prepare(report: Report) -> None:
        import torch

        from clearhead.training import loop

        train_step = loop.train_step

        def corrupt(tensors: Sequence[Any]) -> None:
            tensor = tensors[int(where * len(tensors))]
            with torch.no_grad():
                tensor.view(-1)[int(where * tensor.numel())] = value

        def corrupted(ctx: Any, state: Any, request: Any) -> Any:
            if state.step != step - 1:
                return train_step(ctx, state, request)
            weights = [weight for weight in ctx.model.parameters() if weight.requires_grad]
            if kind == "weight":
                corrupt(weights)
            elif kind == "gradient":
                chosen = weights[int(where * len(weights))]
                chosen.register_post_accumulate_grad_hook(lambda weight: corrupt([weight.grad]))
            must_stop = train_step(ctx, state, request)
            if kind == "optimizer":
                states = ctx.optimizers.state_tensors()
                names = sorted(name for name, t in states.items() if t.is_floating_point() and t.numel() > 1)
                corrupt([states[name] for name in names])
            return must_stop

        loop.train_step = corrupted

    return prepare


def not_finite(run_folder: Path) -> list[str]:
    """Tensors in checkpoints with non-finite numbers."""
    from safetensors.torch import load_file

    found = []
    for path in sorted(run_folder.glob("checkpoints/step-*/*.safetensors")):
        names = [n for n, t in load_file(path).items() if t.is_floating_point() and not t.isfinite().all()]
        found += [f"{name} in {path.parent.name}/{path.name}" for name in names]
    return found
