"""`clearhead open` serves the page of a model; `clearhead export` writes it to one HTML file."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.options import Parser, reader, say, warn
from clearhead.messages import printable
from clearhead.training.run_directory import find_run

OPEN_DETAILS = """\
Without an argument, the page shows a vision transformer for handwritten digits
that comes with clearhead, and lists the runs in runs/. Draw a digit, or choose
a test image, look at the attention of every layer and head, and change the
image, the heads or the temperature to see what the prediction depends on.

Models of Clearhead's own VisionTransformer run in the browser. Any other image
classifier whose attention clearhead.look can record runs in PyTorch on this
machine: FILE.py:NAME is an nn.Module, a class that is built without arguments,
or a function that returns a module, such as a model of timm or Hugging Face.

The server listens on 127.0.0.1 and answers only whoever has its link: keep the
link to yourself. Ctrl-C stops it. No request leaves this machine."""

EXPORT_DETAILS = """\
The file contains the viewer, the weights in float16 and some test images. It
opens from disk and makes no request, so it can be sent to anybody: whoever has
it can draw, look at the attention, and edit heads and patches."""

EXPOSED = """\
{host} is not a loopback address: everybody who can reach port {port} and has the
link sees your models, test images and class names, and can make this machine
compute. The connection is not encrypted."""


def open_page(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead open",
        "Open a page in the browser to draw, look at attention, and edit a model.",
        usage="clearhead open [RUN | FILE.py:NAME] [options]",
        examples=("clearhead open", "clearhead open runs/demo", "clearhead open mymodel.py:vit --image 3x224x224"),
        details=OPEN_DETAILS,
    )
    options.add_argument("target", metavar="RUN | FILE.py:NAME", nargs="?", help="a run, or an nn.Module of your own")
    options.add_argument("--model", metavar="FILE.py:NAME", default="", help="the module of a run of clearhead.fit")
    options.add_argument(
        "--image", metavar="CxHxW", type=reader(str), help="shape of the images of a module, such as 3x224x224"
    )
    options.add_argument("--port", metavar="N", type=reader(int), default=0, help="port (default: any free one)")
    options.add_argument("--no-browser", action="store_true", help="print the link only")
    options.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)"
    )
    args = options.parse(argv)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be from 0 to 65535, got {args.port}")

    from clearhead.page import is_loopback, serve
    from clearhead.page.models import Catalog, Target

    is_module = args.target is not None and is_module_path(args.target)
    if args.model and (args.target is None or is_module):
        raise ValueError("--model names the module of a run; try: clearhead open RUN --model FILE.py:NAME")
    target = None
    if args.target is not None:
        module = args.target if is_module else args.model
        target = Target(None if is_module else find_run(args.target), module, image_shape(args.image))

    def announce(link: str) -> None:
        if not is_loopback(args.host):
            warn(EXPOSED.format(host=args.host, port=link.partition("/?")[0].rpartition(":")[2]).replace("\n", " "))
        print(f"Clearhead is at\n\n  {link}\n\nKeep this link to yourself. Ctrl-C stops the server.", flush=True)

    serve(Catalog(target), host=args.host, port=args.port, browser=not args.no_browser, announce=announce)


def is_module_path(text: str) -> bool:
    """FILE.py:NAME or package.file:NAME, unless a run has this name."""
    return re.fullmatch(r".+:\w+", text) is not None and not Path(text).exists()


def image_shape(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-4])x([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise ValueError(f"--image must be CHANNELSxHEIGHTxWIDTH, such as 3x224x224, got {text!r:.40}")
    return int(match[1]), int(match[2]), int(match[3])


def export(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead export",
        "Write the model of a run and the viewer to one HTML file.",
        usage="clearhead export RUN --to html [options]",
        examples=("clearhead export runs/demo --to html", "clearhead export runs/demo --to html --out digits.html"),
        details=EXPORT_DETAILS,
    )
    options.add_run()
    options.add_argument("--to", metavar="FORMAT", choices=["html"], required=True, help="html")
    options.add_argument("--out", metavar="FILE", type=Path, help="an .html file (default: NAME.html, after the run)")
    args = options.parse(argv)
    if args.out is not None:
        check_html(args.out)

    from clearhead.files import write_atomic
    from clearhead.inference.run import Run
    from clearhead.page.describe import export_html

    run = Run(args.run)
    content = export_html(run, lambda line: print(line, file=sys.stderr)).encode()
    path = args.out or Path(f"{run.path.resolve().name}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    say(f"{printable(path)}: {len(content) / 1e6:.2f} MB")


def check_html(path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the page is an .html file, got {path.name!r:.60}; try {path.stem}.html")
