"""`clearhead verify`: whether the files of a run are those that training wrote. It only reads, and loads no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from clearhead.cli.parser import Parser
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.training.audit import Audit

ABOUT = """\
Checks every file of a run and lists what is wrong. Checkpoints are compared
with their manifests (size and SHA-256), metrics.jsonl and config.json with what
the newest intact checkpoint recorded about them. Nothing is written.

  missing     a file or a record is no longer there
  changed     a file is not what was saved
  surplus     a file does not belong to a run
  leftover    a process that was killed did not finish or remove a file
  unsafe      a link or a special file: other commands refuse the run
  unreadable  the system reports an error for a file

Attention maps are compared with the digest in their header. Figures cannot be
compared with anything.
The exit code is 0 if the run is intact, and 1 if it is not."""

EXAMPLES = """\
examples
  clearhead verify mine
  clearhead verify runs/mine --json"""

NOT_INTACT = 1


def run(argv: Sequence[str]) -> int:
    options = Parser("clearhead verify", ABOUT)
    options.usage = "clearhead verify RUN [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.training.audit import audit
    from clearhead.training.records import find_run

    found = audit(find_run(args.run, checked=False))
    if args.json:
        print(json_text({"is_intact": found.is_intact} | asdict(found)))
    else:
        tell(found)
    return 0 if found.is_intact else NOT_INTACT


def tell(found: "Audit") -> None:
    from clearhead.cli.terminal import show

    n = len(found.findings)
    state = "is intact" if found.is_intact else f"is not intact: {n} {'problem' if n == 1 else 'problems'}"
    print(f"{printable(found.run)} {state}{' (a process is training it)' if found.is_running else ''}")
    if found.findings:
        print()
        show(table(found))
        print()
    steps = ", ".join(map(str, found.checkpoints)) or "none"
    print(f"intact checkpoints: {steps}; records: {found.records:,}; files: {found.files:,}")


def table(found: "Audit") -> "Table":
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("file", overflow="fold")
    shown.add_column("finding", no_wrap=True)
    shown.add_column("what is wrong", overflow="fold")
    for finding in found.findings:
        shown.add_row(printable(finding.path), finding.kind, printable(finding.problem))
    return shown
