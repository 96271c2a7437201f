"""The command line of the campaign; the docstring of the package lists its forms."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.campaign
from benchmarks.campaign.shards import Shard, run_case, run_shard, unsupported_reason

RESULTS = Path(__file__).parents[2] / "docs" / "reliability"


def all_shards() -> dict[str, Shard]:
    from benchmarks.campaign import commands, damage, disk, fuzz, hostile, kills, media, nodes, power

    shards: list[Shard] = [
        kills.Kills(),
        nodes.Ranks(),
        nodes.TwoNodes(),
        kills.Signals(),
        kills.Races(),
        disk.FileCalls(),
        power.PowerFailures(),
        disk.FullDisk(),
        damage.NonFinite(),
        damage.Flips(),
        hostile.Links(),
        fuzz.Parsers(),
        media.Images(),
        media.Archives(),
        commands.CommandLines(),
        commands.Soak(),
    ]
    return {shard.name: shard for shard in shards}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign",
        description=benchmarks.campaign.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="default: all; or the single word report")
    parser.add_argument("--small", action="store_true", help="a few cases of each kind")
    parser.add_argument("--count", type=int, metavar="N", help="at most N cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, metavar="M", help="start no case after M minutes")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--only", metavar='"KIND NUMBER"', help="run one case of one shard, and keep its folder")
    parser.add_argument("--list", action="store_true", help="list the shards and their cases")
    args = parser.parse_args(argv)
    if args.shards == ["report"]:
        from benchmarks.campaign.report import write_report

        return write_report(args.results)
    if reason := unsupported_reason():
        print(f"campaign: {reason}", file=sys.stderr)
        return 2

    import torch

    torch.set_num_threads(1)  # a fork has no copies of the threads in the pool, and would wait for them forever
    known = all_shards()
    if unknown := [name for name in args.shards if name not in known]:
        print(f"campaign: no shard {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if args.list:
        for shard in known.values():
            print(f"{shard.name:14}{shard.what}: {shard.counts}")
        return 0
    chosen = [known[name] for name in args.shards or known]
    if args.only:
        return reproduce(chosen[0], args.only, args.seed)
    until = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    n_failures = 0
    for shard in chosen:
        result = run_shard(shard, args.results, args.seed, small=args.small, count=args.count, until=until)
        n_failures += result["n_failures"]
        sys.stdout.flush()
    return 1 if n_failures else 0


def reproduce(shard: Shard, only: str, seed: int) -> int:
    """Run one case, and keep its folder."""
    from benchmarks.campaign.runs import Workspace

    kind, _, number = only.rpartition(" ")
    work = Path(tempfile.mkdtemp(prefix=f"campaign-{shard.name}-"))
    try:
        shard.begin(Workspace(work))
        found = run_case(shard, kind, int(number), seed, work / "case", shard.batch)
    finally:
        shard.end()
    for failure in found:
        print(f"{shard.name} {kind} {number}: {failure.kind}: {failure.what}")
    print(f"{len(found)} failures; the folder of the case is {work / 'case'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
