"""The fault campaign: inject faults into Clearhead, and check that it keeps its promises.

    python -m benchmarks.campaign                    # all shards, each from where it stopped: hours
    python -m benchmarks.campaign kills signals      # only these
    python -m benchmarks.campaign --small            # a few cases of each: minutes
    python -m benchmarks.campaign kills --only "vit 17"   # repeat one case, and keep its folder
    python -m benchmarks.campaign report             # update the table in docs/reliability.md

A shard is a list of cases. Each case is determined by the seed, the shard, its kind and its number, so an interrupted
shard continues where it stopped, and a failing case can be repeated. Results are in docs/reliability/SHARD.json.

    hangs.py        hangs, detected by CPU time and progress instead of wall time
    shards.py       a list of cases, and its results, from which it can be continued
    processes.py    a command in a child process: what it reports, its file calls, its writes outside its folder
    runs.py         three small training runs, and the comparison with a reference run without faults
    kills.py        kill -9, signals, several processes that claim one run
    nodes.py        several processes under torchrun, and two nodes in network namespaces
    disk.py         failing file calls, full disks
    power.py        power failures
    damage.py       flipped bits, non-finite numbers
    hostile.py      links and special files inside a run
    fuzz.py         mutated inputs for all parsers, under limits
    media.py        the same for images and archives
    commands.py     malformed command lines, and the soak
    report.py       the table

Linux only: it reads /proc, and forks.
"""
