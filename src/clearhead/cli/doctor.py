"""`clearhead doctor`: examine a user's own module, one line per check."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.insight.doctor.parameters import RULES
from clearhead.messages import json_text

if TYPE_CHECKING:
    from clearhead.insight.doctor.report import Report

ABOUT = """\
Examines your own transformer from outside: changes the future, the padding, the
order and the dtype, and sees what moves. Faults are certain; warnings are what
cannot be decided from outside. docs/doctor.md explains each check.

MODULE is FILE.py:NAME (or package.file:NAME, as Python imports it). NAME is an
nn.Module, a class built without arguments, or a function that returns a module."""

EPILOG = f"""\
how forward() is called: by the names of its parameters
{RULES}

examples
  clearhead doctor mymodel.py:GPT
  clearhead doctor models/mymodel.py:Encoder --no-causal --width 32
  clearhead doctor package.models:small_model --json

The exit code is 1 if there is a fault. From Python: clearhead.examine(module)"""

FAULT = 1


def run(argv: Sequence[str]) -> int:
    """The exit code: 1 when there is a fault."""
    options = Parser("clearhead doctor", ABOUT)
    options.usage = "clearhead doctor MODULE [options]"
    options.epilog = EPILOG
    options.add_argument("module", metavar="MODULE", help="FILE.py:NAME or package.file:NAME")
    options.add_argument("--no-causal", action="store_true", help="later tokens may be attended to, as in an encoder")
    options.add_argument(
        "--width", type=reader(int), metavar="N", help="pass features of this width instead of token ids"
    )
    options.add_argument("--length", type=reader(int), metavar="N", help="tokens per sequence (default: 7)")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.insight.doctor.examine import examine
    from clearhead.insight.doctor.loading import load

    with redirect_stdout(sys.stderr):  # what the user's file prints is no part of the answer
        module = load(args.module, Path.cwd())
        try:
            report = examine(module, causal=not args.no_causal, width=args.width, length=args.length, name=args.module)
        except SystemExit:
            raise ValueError(f"forward() of {args.module} ends the program") from None
    print(json_text(report.to_dict()) if args.json else as_text(report))
    return FAULT if report.faults else 0


def as_text(report: "Report") -> str:
    """As wide as the terminal: what does not fit goes on below."""
    from clearhead.cli.terminal import console

    width = console().width
    size = max(len(finding.check) for finding in report.findings)
    lines = [*wrap(f"{report.module}: {report.called}", width, subsequent_indent="  "), ""]
    for finding in report.findings:
        verdict = "FAULT" if finding.verdict == "fault" else finding.verdict
        start = f"{verdict:11}  {finding.check:{size}}  "
        lines += wrap(finding.text, width, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join([*lines, "", report.summary()])
