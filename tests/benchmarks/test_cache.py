"""benchmarks/cache.py times generation with and without the key/value cache."""

import importlib.util
import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "cache.py"


def test_every_length_is_measured(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("bench_cache", FILE)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    small = [
        "--width",
        "16",
        "--depth",
        "1",
        "--rounds",
        "1",
        "--lengths",
        "2",
        "5",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert bench.main(small) == 0
    rows = json.loads((tmp_path / "x.json").read_text())
    assert [row["tokens"] for row in rows] == [2, 5]
    assert all(row["with"] > 0 and row["without"] > 0 for row in rows)
    assert "times faster" in capsys.readouterr().out
