import errno
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.training import metrics_log

TRAIN = [{"kind": "train", "step": step, "loss": 1 / (step + 3)} for step in range(5)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for record in TRAIN:
        metrics_log.append(path, record)
    return path


def test_records_round_trip_in_order_one_per_line(path):
    assert metrics_log.read(path) == TRAIN
    assert len(path.read_bytes().splitlines()) == len(TRAIN)


def test_missing_file_has_no_records_and_is_not_created(tmp_path):
    assert metrics_log.read(tmp_path / "metrics.jsonl") == []
    metrics_log.truncate_partial(tmp_path / "metrics.jsonl")
    metrics_log.drop_after(tmp_path / "metrics.jsonl", 0)
    metrics_log.fsync_log(tmp_path / "metrics.jsonl")
    assert os.listdir(tmp_path) == []


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_losses_round_trip_bit_for_bit(tmp_path_factory, losses):
    path = tmp_path_factory.mktemp("records") / "metrics.jsonl"
    for loss in losses:
        metrics_log.append(path, {"loss": loss})
    found = [record["loss"] for record in metrics_log.read(path)]
    assert [struct.pack("d", loss) for loss in found] == [struct.pack("d", loss) for loss in losses]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_non_finite_loss_is_not_written(path, loss):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        metrics_log.append(path, {"step": 5, "loss": loss})
    assert path.read_bytes() == before


def test_partial_last_line_is_ignored_and_truncated(path):
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for n in range(len(last)):
        path.write_bytes(whole[: len(whole) - len(last) + n])
        assert metrics_log.read(path) == TRAIN[:-1]
        metrics_log.truncate_partial(path)
        metrics_log.append(path, TRAIN[-1])
        assert path.read_bytes() == whole


def test_zero_bytes_at_the_end_are_truncated(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 40 + b"\n\0\0")
    metrics_log.truncate_partial(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"\n", b"[1]\n", b'{"loss": NaN}\n', b"\xff\n"])
def test_malformed_line_is_an_error_that_names_it(path, line):
    path.write_bytes(line + path.read_bytes())
    metrics_log.truncate_partial(path)
    with pytest.raises(
        ValueError, match=r"every line of .*metrics.jsonl must be a JSON object, got line 1: .*; remove it"
    ):
        metrics_log.read(path)


def test_drop_after_removes_later_records_and_keeps_the_rest(path):
    metrics_log.append(path, {"kind": "start"})
    lines = path.read_bytes().splitlines(keepends=True)
    metrics_log.drop_after(path, 2)
    assert path.read_bytes() == b"".join([*lines[:3], lines[-1]])


def test_drop_after_does_not_rewrite_an_unchanged_file(path):
    before = path.stat().st_ino
    metrics_log.drop_after(path, 4)
    assert path.stat().st_ino == before


@pytest.mark.parametrize("kill", [False, True])
def test_drop_after_is_atomic_at_every_system_call(path, faults, kill):
    whole = path.read_bytes()
    for at in range(100):
        path.write_bytes(whole)
        error = faults.KILLED if kill else faults.FULL
        _, reached = faults.during(lambda: metrics_log.drop_after(path, 2), at, not kill, error)
        assert metrics_log.read(path) in (TRAIN, TRAIN[:3])
        if not reached:
            break
    assert at > 4
    assert metrics_log.read(path) == TRAIN[:3]


def test_failed_append_leaves_no_partial_line(path, monkeypatch):
    before, write = path.read_bytes(), os.write

    def write_some(file, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        metrics_log.append(path, TRAIN[0])
    monkeypatch.undo()
    assert path.read_bytes() == before
    metrics_log.append(path, TRAIN[0])
    assert metrics_log.read(path) == [*TRAIN, TRAIN[0]]


@pytest.mark.parametrize(
    "line",
    [b'{"step": "x"}', b'{"step": 1, "epoch": []}', b'{"step": 1, "loss": null}', b'{"step": 1%s}' % (b"0" * 400)],
)
def test_non_numeric_value_is_an_error_that_names_its_line(path, line):
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"must be a number in .*metrics\.jsonl, got line 1"):
        metrics_log.read(path)


@pytest.mark.parametrize("line", [b'{"kind": []}\n', b'{"kind": "test", "tta": {}}\n'])
def test_non_string_value_is_an_error_that_names_its_line(path, line):
    path.write_bytes(line)
    with pytest.raises(ValueError, match=r"must be a string in .*metrics\.jsonl, got line 1"):
        metrics_log.read(path)


def test_incremental_digest_equals_the_digest_of_the_file(path):
    digest = metrics_log.Digest(metrics_log.lines(path))
    digest.add(metrics_log.append(path, TRAIN[0]))
    written = digest.value()
    lines = list(metrics_log.lines(path))
    assert written == metrics_log.Digest(lines).value()
    assert metrics_log.RecordsDigest.from_json(written.to_json()) == written
    assert written.difference(lines) == ""
    assert written.difference([*lines, b"more\n"]) == ""
    assert written.difference(lines[1:]) == "1 of 6 records are missing"
    assert written.difference(lines[::-1]) == "some of the first 6 records were changed"


@pytest.mark.parametrize("value", [None, [], 3, {}, {"count": True, "sha256": ""}, {"count": 1, "sha256": 2}])
def test_malformed_digest_is_refused(value):
    with pytest.raises(ValueError, match="records must have a count"):
        metrics_log.RecordsDigest.from_json(value)


def test_file_above_the_size_limit_is_not_read(path):
    os.truncate(path, metrics_log.MAX_BYTES + 1)
    with pytest.raises(OSError, match=r"expected at most 268,435,456 bytes, got 268,435,457"):
        metrics_log.read(path)


HOSTILE = {
    "many": b'{"a": 1.5, "b": 2.5, "c": 3.5, "d": 4.5, "e": 5.5, "f": 6.5}\n'
    * 1_000_000,  # parsed objects take far more memory than their text
    "unended": None,  # a sparse file without a line end
    "long": b'{"kind": "' + b"x" * (150 * 2**20) + b'"}\n',
}
MEASURE = """
import re, sys
from pathlib import Path
from clearhead.training import audit, metrics_log
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before, path = peak(), Path(sys.argv[1])
for read in (metrics_log.read, lambda path: list(
        audit.record_problems(path.parent, {"step": 1, "records": {"count": 3, "sha256": ""}}, False))):
    try:
        read(path)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured with /proc")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_read_within_512_mb(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    if (content := HOSTILE[kind]) is None:
        path.touch()
        os.truncate(path, 2**28)
    else:
        path.write_bytes(content)
    command = [sys.executable, "-c", MEASURE, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(ended.stdout) <= 512


def test_overlong_line_is_named_and_truncated_at_the_end(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "' + b"x" * metrics_log.MAX_LINE_BYTES + b'"}\n')
    with pytest.raises(ValueError, match=r"line 6 of .*metrics\.jsonl has more than 1,048,576 bytes"):
        metrics_log.read(path)
    assert metrics_log.truncate_partial(path) == 1
    assert path.read_bytes() == whole


def test_nested_value_is_refused(path):
    path.write_bytes(b'{"kind": "train", "other": [1]}\n')
    with pytest.raises(ValueError, match="'other' must be a number or a string"):
        metrics_log.read(path)


def test_digest_of_a_test_record_detects_every_flipped_bit(path):
    record = {"kind": "test", "step": 5, "accuracy": 0.875}
    line = metrics_log.append(path, record)
    assert metrics_log.read(path)[-1] == record
    assert metrics_log.is_covered(line)
    for bit in range(8 * (len(line) - 1)):
        changed = bytearray(line)
        changed[bit // 8] ^= 1 << bit % 8
        assert not metrics_log.is_record(bytes(changed)) or not metrics_log.is_covered(bytes(changed))
