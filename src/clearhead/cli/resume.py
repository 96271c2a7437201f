"""`clearhead resume`: the name of a run, nothing else: all its numbers are in its folder."""

from collections.abc import Sequence

from clearhead.cli.parser import Parser

ABOUT = """\
Goes on with a run after its newest whole checkpoint, with the settings that it
began with, as if it had never been interrupted. A run that has ended is not
changed."""


def run(argv: Sequence[str]) -> int:
    options = Parser("clearhead resume", ABOUT)
    options.usage = "clearhead resume RUN [options]"
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument(
        "--shard", action="store_true", help="split the weights over the processes of torchrun (FSDP2)"
    )
    args = options.parse(argv)

    from clearhead.training.loop import resume

    return resume(args.run, shard=args.shard).exit_code
