"""The recorded result of every claim: verdict, measured values and curves, read from results.json without torch.

`python docs/make_lab.py --measure` runs all claims again and writes the file.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from clearhead.lab.claim import Check, Curve, Finding, Kind, Result, Verdict, settings

DIGITS = 6
"""significant digits of recorded values"""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What the command that a claim suggests next measured: the same experiment with changed settings."""

    command: str
    verdict: Verdict
    failed: tuple[Check, ...]
    """the checks that do not pass with these settings"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was measured when a claim was last run with its default settings."""

    kind: Kind
    statement: str
    verdict: Verdict
    settings: Mapping[str, Any]
    """the default settings, `seed` among them; infinity is the string "inf", because JSON has no number for it"""
    checks: tuple[Check, ...]
    curves: tuple[Curve, ...] = ()
    variation: Variation | None = None

    @property
    def result(self) -> Result:
        return Result(self.checks, self.curves)

    def value(self, name: str) -> float:
        """The measured value of the check with this name."""
        for check in self.checks:
            if check.name == name:
                return check.value
        raise LookupError(f"no recorded check named {name!r}; the checks are {[check.name for check in self.checks]}")


@cache
def recorded() -> Mapping[str, Record]:
    """slug -> record, in alphabetical order."""
    text = files("clearhead.lab").joinpath("results.json").read_text(encoding="utf-8")
    return MappingProxyType({slug: from_fields(fields) for slug, fields in json.loads(text).items()})


def from_fields(fields: Mapping[str, Any]) -> Record:
    variation = fields.get("variation")
    return Record(
        kind=fields["kind"],
        statement=fields["statement"],
        verdict=fields["verdict"],
        settings=MappingProxyType(fields["settings"]),
        checks=checks_from(fields["checks"]),
        curves=tuple(
            Curve(curve["quantity"], curve["name"], tuple(curve["x"]), tuple(curve["y"]))
            for curve in fields.get("curves", ())
        ),
        variation=variation and Variation(**{**variation, "failed": checks_from(variation["failed"])}),
    )


def checks_from(rows: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    return tuple(Check(**{**row, "value": float(row["value"])}) for row in rows)


def record(finding: Finding, variation: Variation | None = None) -> Record:
    """The record of a claim that was run with its default settings."""
    assert finding.result, "the claim was not run"
    assert not finding.changed, "a record is a result of the default settings"
    claim = finding.claim
    return Record(
        kind=claim.kind,
        statement=claim.statement,
        verdict=finding.result.verdict,
        settings={name: json_number(parameter.default) for name, parameter in settings(claim).items()},
        checks=finding.checks,
        curves=finding.curves,
        variation=variation,
    )


def to_text(records: Mapping[str, Record]) -> str:
    """The contents of results.json: sorted by slug, one line for each check, values rounded to DIGITS digits."""
    claims = []
    for slug, entry in sorted(records.items()):
        fields = {
            "kind": dump(entry.kind),
            "statement": dump(entry.statement),
            "verdict": dump(entry.verdict),
            "settings": dump(dict(entry.settings)),
            "checks": dump_lines(entry.checks),
        }
        if entry.curves:
            fields["curves"] = dump_lines(entry.curves)
        if entry.variation:
            fields["variation"] = dump(as_json(entry.variation))
        claims.append(
            f" {dump(slug)}: {{\n" + ",\n".join(f'  "{name}": {text}' for name, text in fields.items()) + "\n }"
        )
    return "{\n" + ",\n".join(claims) + "\n}\n"


def dump_lines(items: Iterable[Check | Curve]) -> str:
    """A JSON list with one line for each item."""
    return "[\n" + ",\n".join(f"   {dump(as_json(item))}" for item in items) + "\n  ]"


def as_json(item: Check | Curve | Variation) -> dict[str, Any]:
    return {name: rounded(value) for name, value in asdict(item).items()}


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def rounded(value: Any) -> Any:
    """Numbers rounded to DIGITS significant digits; integers without a decimal point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return json_number(value)


def json_number(value: Any) -> Any:
    """JSON has neither infinity nor NaN, so they are written as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
