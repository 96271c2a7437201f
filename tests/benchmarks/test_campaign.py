"""benchmarks/campaign: a few cases of each shard, resumed and stored results, and the report."""

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc and forks")
pytest.importorskip("benchmarks.soak")

from benchmarks.campaign import (  # noqa: E402
    commands,
    damage,
    disk,
    fuzz,
    kills,
    media,
    nodes,
    power,
    report,
    shards,
)


def start(shard, workspace, size=1):
    shard.begin(workspace)
    shard.size = size
    return shard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "kind"),
    [
        (kills.Kills, "vit"),
        (kills.Kills, "language-model in a save"),
        (kills.Signals, "SIGTERM"),
        (kills.Races, "resume"),
        (disk.FileCalls, "short write"),
        (disk.FileCalls, "ENOSPC"),
        (power.PowerFailures, "moment"),
        (disk.FullDisk, "level"),
        (damage.NonFinite, "gradient"),
    ],
)
def test_one_case_of_each_shard(shard, kind, workspace, case):
    made = start(shard(), workspace)
    try:
        assert made.case(kind, 0, random.Random(1), case) == []
    finally:
        made.end()


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "kind"), [(media.Images, "png"), (media.Archives, "zip"), (fuzz.Parsers, "idx")])
def test_mutated_inputs(shard, kind, workspace, case):
    assert start(shard(), workspace, size=20).case(kind, 0, random.Random(1), case) == []


@pytest.mark.slow
def test_malformed_command_lines(workspace, case):
    assert start(commands.CommandLines(), workspace, size=10).case("command", 0, random.Random(1), case) == []


@pytest.mark.slow
def test_bit_flips_in_a_checkpoint(workspace, case):
    assert start(damage.Flips(), workspace, size=3).case("checkpoint", 20, random.Random(1), case) == []


@pytest.mark.slow
def test_short_soak(workspace, case):
    assert start(commands.Soak(), workspace, size=300).case("steps", 0, random.Random(1), case) == []


@pytest.mark.soak
def test_lost_node_is_detected_and_two_nodes_resume(workspace, case):
    made = start(nodes.TwoNodes(), workspace)
    try:
        assert made.case("node lost", 0, random.Random(1), case) == []
    finally:
        made.end()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["rank 0", "rank 1"])
def test_killed_rank_ends_the_run_which_resumes(kind, workspace, case):
    assert start(nodes.Ranks(), workspace).case(kind, 0, random.Random(1), case) == []


class Counted(shards.Shard):
    """Counts its cases, one of which may fail."""

    name, what, counts, small = "counted", "nothing", {"a": 4, "b": 2}, 1

    def __init__(self, fails_at=None):
        self.done, self.fails_at = [], fails_at

    def begin(self, workspace):
        pass

    def case(self, kind, number, rng, folder):
        self.done.append((kind, number, rng.random()))
        return [shards.Failure("lost save", "step 4")] if (kind, number) == self.fails_at else []


@pytest.fixture
def without_workspace(monkeypatch):
    monkeypatch.setattr(shards, "Workspace", lambda folder: None)


def test_interrupted_shard_continues_with_the_same_cases(without_workspace, tmp_path):
    whole, first, rest = Counted(), Counted(), Counted()
    shards.run_shard(whole, tmp_path / "whole", 1, say=lambda line: None)
    shards.run_shard(first, tmp_path / "parts", 1, small=True, say=lambda line: None)
    assert len(first.done) == 2
    result = shards.run_shard(rest, tmp_path / "parts", 1, say=lambda line: None)
    assert sorted(first.done + rest.done) == sorted(whole.done)
    assert result["done"] == result["wanted"] == {"a": 4, "b": 2}


def test_results_of_another_seed_or_version_are_discarded(without_workspace, tmp_path, monkeypatch):
    shards.run_shard(Counted(), tmp_path, 1, say=lambda line: None)
    other = Counted()
    shards.run_shard(other, tmp_path, 2, say=lambda line: None)
    assert len(other.done) == 6
    monkeypatch.setattr(shards, "source_digest", lambda: "another")
    changed = Counted()
    shards.run_shard(changed, tmp_path, 2, say=lambda line: None)
    assert len(changed.done) == 6


def test_failure_is_stored_with_the_command_that_reproduces_it(without_workspace, tmp_path):
    said = []
    shards.run_shard(Counted(("a", 2)), tmp_path, 1, say=said.append)
    stored = json.loads((tmp_path / "counted.json").read_text())
    assert stored["n_failures"] == 1
    assert stored["kinds"] == {"lost save": 1}
    assert stored["failures"][0]["reproduce"] == 'python -m benchmarks.campaign counted --seed 1 --only "a 2"'
    assert said[0] == "counted a 2: lost save: step 4"
    assert {"seed", "date", "torch", "python", "processor", "seconds", "wanted", "done"} <= stored.keys()


def test_exception_in_a_case_is_a_failure_and_the_shard_continues(without_workspace, tmp_path, monkeypatch):
    shard = Counted()
    monkeypatch.setattr(shard, "case", lambda *args: 1 // 0)
    result = shards.run_shard(shard, tmp_path, 1, small=True, say=lambda line: None)
    assert result["n_failures"] == 2
    assert result["failures"][0]["kind"] == "case not finished"


def test_report_of_an_incomplete_campaign_says_so(without_workspace, tmp_path):
    shards.run_shard(Counted(("a", 0)), tmp_path / "results", 1, small=True, say=lambda line: None)
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    assert report.write_report(tmp_path / "results", page) == 1
    text = page.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter\n")
    assert "| `counted` | nothing | 2 | 6 | 1 | 1 |" in text
    assert "**Not the full campaign**" in text
    assert "1 lost saves" in text
    assert "old" not in text


def test_largest_memory_peak_is_kept_when_a_shard_continues(without_workspace, tmp_path):
    for small, peak in ((True, 40.0), (False, 30.0)):
        shard = Counted()
        shard.peak_mb = peak
        result = shards.run_shard(shard, tmp_path, 1, small=small, say=lambda line: None)
    assert result["peak_mb"] == 40.0
    assert "40 MB in `counted`" in report.table([result])


def test_page_shows_the_stored_results():
    results = report.read_results(ROOT / "docs" / "reliability")
    assert report.table(results) in (ROOT / "docs" / "reliability.md").read_text()
