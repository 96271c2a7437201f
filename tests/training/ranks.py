"""Distributed runs on this machine: each rank is forked from one process that has already imported torch.

python ranks.py FOLDER   trains and resumes everything that test_distributed_runs.py checks, into FOLDER
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # imported lazily by torch: once here instead of in every fork
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.vocab import EOS
from clearhead.models.config import PredictorConfig, Seq2SeqConfig
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.sequences import Reverse
from clearhead.training import checkpoint, progress
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig
from clearhead.training.loop import resume, train

CONFIG = RunConfig(
    recipe="test",
    model=PredictorConfig(
        width=8, depth=2, num_heads=2, in_features=5, out_features=5, context_length=6, pos_embed="learned"
    ),
    data=Reverse(),
    optimizer=OptimizerConfig(name="muon", lr=0.005, warmup=2, grad_clip=0.5),
    training=TrainingConfig(
        steps=8,
        batch_size=11,
        grad_accum_steps=2,
        ema=0.8,
        log_every=1,
        evaluate_every=4,
        checkpoint_every=2,
        keep_checkpoints=9,
        precision="float32",
    ),
)
FREQUENT_EVAL = replace(CONFIG, training=replace(CONFIG.training, evaluate_every=1, checkpoint_every=8))
"""most evaluations are followed by a training step rather than by a checkpoint"""
SEQ2SEQ = replace(
    CONFIG,
    model=Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=8, tgt_vocab_size=8),
    data=Pronounce(window=2),
    training=replace(CONFIG.training, label_smoothing=0.1),
)
WITH_DROPOUT = replace(CONFIG, model=replace(CONFIG.model, dropout=0.2))


class Digits:
    """n sequences of 6 digits, to be reversed."""

    def __init__(self, n, seed):
        self.ids = torch.randint(5, (n, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def get_batch(self, indices):
        return self.ids[indices], self.ids[indices].flip(1)


def words(n, seed):
    """n words of 1 to 6 letters, with the reversed word as the target."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (n,), generator=generator).tolist()
    ids = [torch.randint(3, 8, (size,), generator=generator).tolist() for size in sizes]
    return SequencePairs.of(ids, [[*word[::-1], EOS] for word in ids])


def run_ranks(world, work):
    """Forks `world` processes that call work(rank); returns their exit codes and the seconds between the first and the
    last exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            try:
                os._exit(work(rank).exit_code)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children[child] = rank
    codes, ends, began = [0] * world, [], time.monotonic()
    for _ in range(world):
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
        ends.append(time.monotonic())
    return {"codes": codes, "seconds": ends[-1] - ends[0], "all": ends[-1] - began}


def with_signal_at(step, number, only_rank, work):
    """The same work, with a signal sent to one rank during a given step."""

    def work_with_signal(rank):
        whole = Batches.at

        def at(self, now, rank=0, world=1):
            if now == step - 1 and rank == only_rank:
                os.kill(os.getpid(), number)
            return whole(self, now, rank, world)

        Batches.at = at
        return work(rank)

    return work_with_signal


def run_ranks_without_launcher(world, folder, work):
    """Forks a launcher that forks `world` ranks; rank 0 kills the launcher in its third step. The ranks write their
    exit codes to files because no parent is left to wait for them."""

    def kill_launcher(rank):
        whole = Batches.at

        def at(self, now, rank=0, world=1):
            if now == 2 and rank == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            if now > 2:
                time.sleep(0.2)  # leaves time to notice the dead launcher before the last step
            return whole(self, now, rank, world)

        Batches.at = at
        outcome = work(rank)
        (folder / f"orphan-{rank}").write_text(str(outcome.exit_code))
        return outcome

    launcher = os.fork()
    if launcher == 0:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it
        run_ranks(world, kill_launcher)
        os._exit(0)
    status, began = os.waitpid(launcher, 0)[1], time.monotonic()
    codes = [folder / f"orphan-{rank}" for rank in range(world)]
    while not all(path.exists() and path.read_text() for path in codes) and time.monotonic() - began < 60:
        time.sleep(0.05)
    return {"launcher": status, "codes": [int(path.read_text()) for path in codes if path.exists()]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    digits, pairs = (Dataset(make(47, 0), make(13, 1), make(513, 2), (), None) for make in (Digits, words))
    Reverse.read = lambda task, seed: digits
    Pronounce.read = lambda task, seed: pairs

    def new(name, config=CONFIG, **options):
        return lambda rank: train(config, folder / name, quiet=True, **options)

    def again(name, **options):
        return lambda rank: resume(folder / name, quiet=True, **options)

    done = {}
    for world in (1, 2, 3):
        done[f"of{world}"] = run_ranks(world, new(f"of{world}"))
    for world in (1, 2):
        done[f"seq2seq of {world}"] = run_ranks(world, new(f"seq2seq of {world}", SEQ2SEQ))
    done["seq2seq sharded"] = run_ranks(2, new("seq2seq sharded", SEQ2SEQ, shard=True))
    done["sharded"] = run_ranks(2, new("sharded", shard=True))
    for world in (1, 2):
        done[f"frequent-eval-{world}"] = run_ranks(world, new(f"frequent-eval-{world}", FREQUENT_EVAL, shard=True))

    done["uninterrupted"] = run_ranks(2, new("uninterrupted", WITH_DROPOUT))
    done["stopped"] = run_ranks(2, with_signal_at(5, signal.SIGTERM, 1, new("stopped", WITH_DROPOUT)))
    done["continued"] = run_ranks(2, again("stopped"))

    done["stopped2"] = run_ranks(2, with_signal_at(5, signal.SIGTERM, 0, new("recounted")))
    done["recounted"] = run_ranks(3, again("recounted"))

    done["stopped sharded"] = run_ranks(2, with_signal_at(5, signal.SIGTERM, 0, new("resharded", shard=True)))
    done["resharded"] = run_ranks(2, again("resharded", shard=True))

    done["killed"] = run_ranks(2, with_signal_at(6, signal.SIGKILL, 1, new("killed")))
    done["after the kill"] = checkpoint.saved_steps(folder / "killed")
    done["revived"] = run_ranks(2, again("killed"))
    progress.LAUNCHER_INTERVAL = 0.1
    done["orphaned"] = run_ranks_without_launcher(2, folder, new("orphaned"))
    done["after the launcher"] = checkpoint.saved_steps(folder / "orphaned")
    done["relaunched"] = run_ranks(2, again("orphaned"))
    (folder / "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
