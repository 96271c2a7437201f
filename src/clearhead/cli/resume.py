"""`clearhead resume`: continues a run with the settings in its folder; only its length and threads can be changed."""

from collections.abc import Sequence

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser

ABOUT = """\
Resumes an interrupted run from its newest intact checkpoint, with the settings
that it began with, exactly as if it had not been interrupted. A finished run is
left unchanged, unless --epochs or --steps lengthens it: its learning-rate
schedule is then stretched to the new end, so the result differs from that of a
run that had this length from the beginning."""

EXAMPLES = """\
examples
  clearhead resume mine
  clearhead resume runs/mine --threads 1
  clearhead resume mine --epochs 50"""


def run(argv: Sequence[str]) -> int:
    options = Parser("clearhead resume", ABOUT)
    options.usage = "clearhead resume RUN [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    length = options.add_mutually_exclusive_group()
    length.add_argument("--epochs", metavar="N", type=reader(int), help="train until epoch N, counted from the start")
    length.add_argument("--steps", metavar="N", type=reader(int), help="train until step N, counted from the start")
    options.add_argument(
        "--threads", metavar="N", type=reader(int), help="number of CPU threads from now on; 0 for PyTorch's default"
    )
    options.add_argument(
        "--shard", action="store_true", help="split the weights over the processes of torchrun (FSDP2)"
    )
    args = options.parse(argv)

    from clearhead.recipes.start import resume

    return resume(args.run, epochs=args.epochs, steps=args.steps, threads=args.threads, shard=args.shard).exit_code
