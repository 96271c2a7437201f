"""Bits that flip in a run's files, and numbers that stop being finite."""

import contextlib
import hashlib
import io
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Child, Prepare, Tell, run
from benchmarks.campaign.runs import KINDS, PATIENCE, STEPS, Stage, check_ended, finish_and_compare, last_line
from benchmarks.campaign.shards import Failure, Shard

MODEL = "vit"
VERIFY = "verify"
"""the command that checks every file of a run against its manifest, where this version has it"""


class Flips(Shard):
    """One bit of one file of a run is flipped; then the commands that read the file are run.

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

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        from benchmarks.campaign.kills import stop_at

        home = stage.new("half")
        train = stage.train(MODEL, snapshots__inputs=2, snapshots__every=4)
        run(train, home, PATIENCE, prepare=stop_at(STEPS // 2), may_write=[stage.cache])
        self.half = home / "runs" / "run"
        self.whole = stage.undisturbed(MODEL, "-probed", snapshots__inputs=2, snapshots__every=4)
        self.intact: dict[tuple[str, ...], Any] = {}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        """A batch of flips, all in one child."""
        places = [self.flip_of(kind, number + i) for i in range(self.size)]
        self.stage.copy(self.half, folder)
        child = Child([], folder, job=lambda: self.flip_all(kind, places), may_write=[self.stage.cache])
        ended = child.wait(PATIENCE)
        found = [
            Failure(*line.removeprefix("failure ").split(": ", 1))
            for line in ended.out.splitlines()
            if line.startswith("failure ")
        ]
        found += check_ended(ended, [0], f"{len(places)} flips in {kind}") if not found else []
        if number // self.batch % self.resume_every == 0:
            found += self.resume_flipped(kind, places[0], folder)
        return found

    def flip_of(self, kind: str, number: int) -> tuple[str, int]:
        """The file, below the run, and the bit of case `number`."""
        rng = random.Random(f"{self.seed} flip {kind} {number}")
        patterns = {
            "checkpoint": "checkpoints/step-*/*",
            "config": "config.json",
            "metrics": "metrics.jsonl",
            "best": "best.json",
            "snapshots": "snapshots/*",
        }
        path = rng.choice(sorted(self.half.glob(patterns[kind])))
        return str(path.relative_to(self.half)), rng.randrange(8 * path.stat().st_size)

    def flip_all(self, kind: str, places: Sequence[tuple[str, int]]) -> int:
        """In the child: flips, asks, flips back."""
        run_folder = Path("runs/run")
        for command in commands_for(kind):
            self.intact[tuple(command)] = asked(command)
        for name, bit in places:
            intact = (run_folder / name).read_bytes()
            (run_folder / name).write_bytes(flipped(intact, bit))
            for failure in self.silent(kind, f"bit {bit} of {name}"):
                os.write(1, f"failure {failure.kind}: {failure.what!r}\n".encode())
            restore(self.half, run_folder, name, intact)
        return 0

    def silent(self, kind: str, where: str) -> list[Failure]:
        found, is_noticed, differs = [], False, []
        for command in commands_for(kind):
            code, out, err = asked(command)
            _, good, usual = self.intact[tuple(command)]
            err = "" if err == usual else err  # such as the warning that the run is unfinished
            if code not in (0, 1, 2) or "Traceback" in err:
                found.append(Failure("exit 5", f"{where}: {command[0]} ended with code {code}: {last_line(err)}"))
            is_noticed = is_noticed or code != 0 or bool(err.strip())
            if out != good and code == 0 and not err.strip():
                differs.append(command[0])
        if differs and kind in ("metrics", "snapshots") and not is_noticed:
            is_noticed = has_verify() and asked([VERIFY, "runs/run"])[0] != 0
        if differs and not is_noticed:
            found.append(Failure("silent difference", f"{where}: another answer of {', '.join(differs)}"))
        return found

    def resume_flipped(self, kind: str, place: tuple[str, int], folder: Path) -> list[Failure]:
        """Resuming is refused, announces something, or ends with the bits of the undisturbed run."""
        name, bit = place
        shutil.rmtree(folder / "runs")
        copy = self.stage.copy(self.half, folder)
        (copy / name).write_bytes(flipped((copy / name).read_bytes(), bit))
        ended = run(["resume", "runs/run"], folder, PATIENCE, may_write=[self.stage.cache])
        found = check_ended(ended, [0, 1, 2], f"resume after bit {bit} of {name} was flipped")
        if ended.code == 0 and not ended.err.strip():
            newest = f"checkpoints/step-{STEPS:08d}/model.safetensors"
            if digest(copy / newest) != digest(self.whole / newest):
                found.append(Failure("silent difference", f"bit {bit} of {name}: other weights after a resume"))
        return found


def commands_for(kind: str) -> list[list[str]]:
    """What reads a file of this kind."""
    return {
        "metrics": [["curves", "runs/run", "--csv", "-"]],
        "snapshots": [["look", "runs/run", "--training-dynamics", "--out", "figures"]],
    }.get(kind, [["predict", "runs/run", "picture.png", "--json"]])


def asked(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    from clearhead.cli.main import main

    if command[0] == "look":
        return maps_read()
    if not Path("picture.png").exists():
        from PIL import Image

        Image.new("RGB", (16, 16), (200, 40, 90)).save("picture.png")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(command))
    return code, out.getvalue(), err.getvalue()


def maps_read() -> tuple[int, str, str]:
    """What `look --training-dynamics` would draw; drawing it 2,000 times would take hours and show nothing else."""
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
    """As it was before the flip: reading may rename a damaged checkpoint only for the owner of a run, and nobody owns
    this one."""
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
        self.stage.undisturbed(model)
        prepare = inject(kind, step, value, rng.random())
        ended = run(self.stage.train(model), folder, PATIENCE, prepare=prepare, may_write=[self.stage.cache])
        what = f"{value} in the {kind} at step {step}"
        found = check_ended(ended, [4], what)
        found += [Failure("non-finite checkpoint", f"{what}: {line}") for line in not_finite(folder / "runs" / "run")]
        rest = finish_and_compare(self.stage, model, folder, ended.saved)
        return found + [Failure(f.kind, f"{what}: {f.what}") for f in rest]


def inject(kind: str, step: int, value: float, where: float) -> Prepare:
    """Spoils one number just before the update that makes this step, or, of the optimizer, just after it."""

    def prepare(tell: Tell) -> None:
        import torch

        from clearhead.training import loop

        train_step = loop.train_step

        def spoil(tensors: Sequence[Any]) -> None:
            tensor = tensors[int(where * len(tensors))]
            with torch.no_grad():
                tensor.view(-1)[int(where * tensor.numel())] = value

        def spoilt(ctx: Any, state: Any, request: Any) -> Any:
            if state.step != step - 1:
                return train_step(ctx, state, request)
            weights = [weight for weight in ctx.model.parameters() if weight.requires_grad]
            if kind == "weight":
                spoil(weights)
            elif kind == "gradient":
                chosen = weights[int(where * len(weights))]
                chosen.register_post_accumulate_grad_hook(lambda weight: spoil([weight.grad]))
            must_stop = train_step(ctx, state, request)
            if kind == "optimizer":
                states = ctx.optimizers.state_tensors()
                names = sorted(name for name, t in states.items() if t.is_floating_point() and t.numel() > 1)
                spoil([states[name] for name in names])
            return must_stop

        loop.train_step = spoilt

    return prepare


def not_finite(run_folder: Path) -> list[str]:
    """Numbers in checkpoints that are not finite."""
    from safetensors.torch import load_file

    found = []
    for path in sorted(run_folder.glob("checkpoints/step-*/*.safetensors")):
        names = [n for n, t in load_file(path).items() if t.is_floating_point() and not t.isfinite().all()]
        found += [f"{name} in {path.parent.name}/{path.name}" for name in names]
    return found
