"""`clearhead data`: which data sets there are, fetching one, and looking at one."""

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.parser import Parser

if TYPE_CHECKING:
    from clearhead.data.config import DataConfig
    from clearhead.data.store import Stored

ABOUT = """\
clearhead data list                        which data sets there are
clearhead data get NAME [--from PATH]      fetch one, or take it from a folder or archive that you have
clearhead data show NAME [--out FILE]      look at one: a contact sheet, or examples as text

Fetched data is kept in ~/.cache/clearhead, or where CLEARHEAD_CACHE says, and
checked against the makers' own bytes."""

USAGE = "list, get NAME or show NAME"


def run(argv: Sequence[str]) -> int:
    match list(argv):
        case [] | ["-h" | "--help", *_]:
            print(f"usage: clearhead data {USAGE}\n\n{ABOUT}")
        case ["list", *rest]:
            Parser("clearhead data list", "Which data sets there are.").parse(rest)
            show_list()
        case [("get" | "show") as verb, name, *rest] if not name.startswith("-"):
            (get if verb == "get" else show)(name, rest)
        case [("get" | "show") as verb, "-h" | "--help", *_]:
            print(f"usage: clearhead data {verb} NAME\n\n{ABOUT}")
        case [("get" | "show") as verb, *_]:
            raise ValueError(f"data {verb} needs the name of a data set, got none; see clearhead data list")
        case [other, *_]:
            raise LookupError(f"data takes {USAGE}, got {other!r}; see clearhead data --help")
    return 0


def show_list() -> None:
    from clearhead.data.datasets import DATASETS

    size = max(map(len, DATASETS))
    for name, entry in DATASETS.items():
        print(f"{name:{size}}  {state_of(name):13}  {entry.what}")


def state_of(name: str) -> str:
    from clearhead.data.datasets import DATASETS
    from clearhead.data.store import has

    origin = DATASETS[name].origin
    if origin != "fetched":
        return origin
    return "fetched" if has(name) else "to be fetched"


def get(name: str, argv: Sequence[str]) -> None:
    options = Parser(f"clearhead data get {name}", "Fetches a data set, from the first of its sources that has it.")
    options.add_argument("--from", dest="path", metavar="PATH", help="a folder or archive that you have already")
    args = options.parse(argv)
    check_name(name)
    from clearhead.data.datasets import DATASETS
    from clearhead.data.own_files import own_path
    from clearhead.data.sources import Here
    from clearhead.data.store import obtain

    if DATASETS[name].origin != "fetched":
        fetched = [other for other, entry in DATASETS.items() if entry.origin == "fetched"]
        raise ValueError(f"what is fetched is {' or '.join(fetched)}, got {name}; it can be used as it is")
    wanted: Stored = import_module(DATASETS[name].home).STORED
    sources = [Here(own_path(args.path))] if args.path else wanted.sources
    folder = obtain(wanted, sources, lambda line: print(line, file=sys.stderr))
    print(f"{name} is in {folder}, checked; look at it with: clearhead data show {name}")


def show(name: str, argv: Sequence[str]) -> None:
    options = Parser(
        f"clearhead data show {name}", "A contact sheet as a PNG file; of digits, words and texts, examples as text."
    )
    options.add_argument("--out", metavar="FILE", help=f"where the sheet goes ({name}.png)")
    options.add_argument(
        "--from", dest="path", metavar="PATH", default="", help="folder: the pictures; pronounce, text, words: the file"
    )
    options.add_argument("--question", default="commonest", help="whole: commonest, repeat or sum")
    options.add_argument("--seed", type=int, default=0, help="which examples (0)")
    args = options.parse(argv)
    check_name(name)
    from clearhead.data.config import DataConfig

    is_short = name == "whole" and args.question == "repeat"
    length = 64 if name == "text" else 8 if is_short else 16
    paths = {"folder": args.path, "file": args.path, "train_file": args.path}
    config = DataConfig(name=name, question=args.question, length=length, validation=0, **paths)
    if name in ("reverse", "whole"):
        show_digits(config, args.seed)
    elif name in ("pronounce", "words", "text"):
        show_symbols(config, args.seed)
    else:
        out = Path(args.out or f"{name}.png")
        write_sheet(config, args.seed, out)
        print(f"wrote {out}")


def show_digits(config: "DataConfig", seed: int) -> None:
    import torch

    from clearhead.data.datasets import load

    data = load(config, seed)
    ids, targets = data.train.take(torch.arange(10))
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        answer = " ".join(map(str, target)) if isinstance(target, list) else f"{target:g}"
        print(f"{' '.join(map(str, row))}   ->   {answer}")


def show_symbols(config: "DataConfig", seed: int) -> None:
    """Ten examples drawn by the seed: words with their phones, words, or pieces of the text."""
    from clearhead.data.datasets import load
    from clearhead.data.draws import key_of, order
    from clearhead.data.tokens import Vocabulary

    if config.name == "text" and not config.file:
        raise ValueError("a text is read from a file, got none; add --from PATH")
    data = load(config, seed)
    sources, targets = data.train.take(order(key_of(seed, "show"), len(data.train))[:10])
    read, written = Vocabulary(data.symbols), Vocabulary(data.classes)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        shown = "".join(read.read(source))
        answer = f"   ->   {' '.join(written.read(i for i in target if i >= 0))}"
        print(repr(shown) if config.name == "text" else shown + answer * (config.name == "pronounce"))


def write_sheet(config: "DataConfig", seed: int, out: Path) -> None:
    from clearhead.data.datasets import load
    from clearhead.data.sheet import contact_sheet
    from clearhead.files import write_atomic

    if out.suffix.lower() != ".png":
        raise ValueError(f"a contact sheet is a .png file, got {str(out)!r}; try --out {out.with_suffix('.png')}")
    packed = io.BytesIO()
    contact_sheet(load(config, seed)).save(packed, "PNG")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, packed.getvalue())


def check_name(name: str) -> None:
    from clearhead.data.config import DataConfig

    DataConfig(name=name)
