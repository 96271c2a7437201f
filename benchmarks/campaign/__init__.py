"""The fault campaign: kill, starve, damage and mislead Clearhead, and check that it keeps its promises.

    python -m benchmarks.campaign                    # every shard, as far as it is not done yet: hours
    python -m benchmarks.campaign kills signals      # only these
    python -m benchmarks.campaign --small            # a few cases of each: minutes
    python -m benchmarks.campaign kills --only "vit 17"   # reproduce one case, and keep its folder
    python -m benchmarks.campaign report             # the table in docs/reliability.md, from the results

A shard is a list of cases. Each case is determined by the seed, the shard, its kind and its number, so an interrupted
shard continues where it stopped, and a failing case can be repeated. Results are in docs/reliability/SHARD.json.

    hangs.py        hangs, detected by CPU time and progress instead of wall time
    shards.py       what a shard is, how its results are stored and continued
    processes.py    a command in a child process that is watched: reports, file calls, writes outside its folder
    runs.py         three small training runs to disturb, and the comparison with the undisturbed one
    kills.py        kill -9, signals, races for one run
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
