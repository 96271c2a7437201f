"""Look inside a model: `clearhead look` plots the attention of a run, `doctor` examines a module of your own.

`clearhead open` serves the page of a model, and `clearhead export` writes it to one HTML file.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, console, reader, say, warn, warn_if_unfinished
from clearhead.messages import json_text, printable
from clearhead.training.run_directory import find_run

if TYPE_CHECKING:
    from clearhead.insight.doctor.report import Report

LOOK_DETAILS = """\
An example of the test set (--sample) is shown with its prediction, its target
and whether they agree. The figures show every layer and head, one head in
detail, and the effect of removing each head.

For an image they also show the attention to each patch as a tint over the
image, and aggregates over all layers (mean, maximum, rollout, relevance) beside
occlusion: how much the probability of the predicted class drops when a patch is
hidden. The deletion area rates a map: patches are hidden one by one, the
highest ranked first, and the area under the curve of the probability is between
0 and 1; a smaller area means a better map.

For a word to be pronounced they show which letters each phone attends to.

--training-dynamics shows how the heads changed during the training of a run that
saved attention snapshots:
  clearhead train reverse --name watched --snapshots 4
  clearhead look runs/watched --training-dynamics"""

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

INPUTS = ("sample", "image", "ids", "text")


def look(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead look",
        "Plot the attention of a run for one example.",
        usage="clearhead look RUN (--sample N | --image FILE | --ids N... | --text TEXT) [options]",
        examples=(
            "clearhead look runs/demo --sample 3",
            "clearhead look runs/demo --image my-digit.png --invert",
        ),
        details=LOOK_DETAILS,
    )
    options.add_run()
    options.add_argument("--sample", metavar="N", type=reader(int), help="index of a test example, starting at 0")
    options.add_argument("--image", metavar="FILE", type=Path, help="an image file")
    options.add_argument("--ids", metavar="N", nargs="+", type=int, help="digits, for a run of reverse or digits")
    options.add_argument("--text", metavar="TEXT", help="a word, for a run of pronounce; text, for words and text")
    options.add_argument(
        "--training-dynamics", action="store_true", help="plot the heads during training instead of an example"
    )
    options.add_argument("--invert", action="store_true", help="invert images: MNIST's digits are white on black")
    options.add_argument(
        "--out", metavar="FOLDER", type=Path, help="folder of the figures (default: figures/look in the run's folder)"
    )
    options.add_argument("--html", metavar="FILE", type=Path, help="write one interactive HTML file instead of figures")
    args = options.parse(argv)
    check_one_input(args)
    if args.html is not None and (args.training_dynamics or args.out is not None):
        other = "--training-dynamics" if args.training_dynamics else "--out"
        raise ValueError(f"--html writes one page instead of figures, got {other} as well")
    if args.training_dynamics:
        from clearhead.inference.explain import plot_training_dynamics

        print_figures(plot_training_dynamics(args.run, args.out, announce_drawing))
        return

    from clearhead.inference import explain
    from clearhead.inference.run import Run

    run = Run(args.run)
    warn_if_unfinished(run.path, run.step)
    if args.sample is not None:
        example = explain.dataset_example(run, args.sample)
    else:
        (option,) = (name for name in ("image", "text", "ids") if getattr(args, name) is not None)
        if option != run.task.input_option:
            raise ValueError(f"{run.path} takes {run.task.input_kind}, got --{option}; try --{run.task.input_option}")
        inputs = getattr(args, option)
        example = run.task.example(run, inputs, invert=args.invert)
        if note := run.task.input_warning(run, inputs):
            warn(note)
    say(example.sentence)
    if args.html is not None:
        from clearhead.page.describe import save_trace_html

        say(f"Page: {save_trace_html(run, example, args.html)}")
        return
    print()
    hint_if_busy()
    announce_drawing()
    print_figures(explain.explain_input(run, example, args.out))


def check_one_input(args: Namespace) -> None:
    given = [name for name in INPUTS if getattr(args, name) is not None]
    given += ["training-dynamics"] * args.training_dynamics
    if len(given) != 1:
        options = " and ".join(f"--{name}" for name in given) or "none of them"
        raise ValueError(
            f"look needs one of --sample, --image, --ids, --text and --training-dynamics, got {options}; try --sample 0"
        )


def announce_drawing() -> None:
    """Prints a line to stderr, because drawing takes seconds."""
    print("Drawing figures ...", file=sys.stderr, flush=True)


def hint_if_busy() -> None:
    """Prints a hint if there are too many threads: the hundreds of forward passes of occlusion would be slow."""
    import torch

    from clearhead.training.progress import OMP_THREADS_HINT, oversubscription_hint

    if hint := oversubscription_hint(torch.get_num_threads(), remedy=OMP_THREADS_HINT):
        print(hint, file=sys.stderr, flush=True)


def print_figures(figures: Sequence[tuple[Path, str]]) -> None:
    print("Figures:")
    for path, title in figures:
        say(f"  {path!s:40}  {title}")


# `clearhead doctor`


ABOUT_DOCTOR = "Examine your own transformer: leaking masks, NaN, padding, order, dtypes, dead parameters."

PARAMETER_RULES = """\
  first parameter                  the sequence: token ids if the module has an
                                   nn.Embedding, else features or images
  key, value (after query)         the same sequence
  tgt, trg, decoder_input_ids ...  the decoder's input; y and target, too, if
                                   they are required
  memory, enc_out, context ...     the encoder's output, if required
  attention_mask, *padding_mask    a padding mask, such as (batch, length)
  lengths, src_lengths, seq_lens   the number of real tokens
  mask, attn_mask, tgt_mask ...    an attention mask, such as (length, length)
  is_causal, causal                True, if the module is not causal without it
  labels, targets                  the token ids, if needed
  past_key_values, cache, state    None; start_pos, offset: 0, if required
  any other, loss_mask=None ...    its default; it must have one"""

DOCTOR_DETAILS = f"""\
The doctor changes later tokens, padding, the order of tokens and the dtype, and
checks which outputs change. A fault is certainly wrong; a warning may be
intended. docs/doctor.md explains each check. The exit code is 1 if there is a
fault.

MODULE is FILE.py:NAME, or package.file:NAME for an importable module. NAME is an
nn.Module, a class without required arguments, or a function that returns an
nn.Module. The names of the parameters of forward() determine its arguments:

{PARAMETER_RULES}

Other inputs: --inputs FILE.py:NAME, a tuple of tensors, a dict, or a function
that returns one. --loss FILE.py:NAME is a function loss(logits, ids).

In Python: clearhead.examine(module, inputs=None, loss=None)"""

FAULT_EXIT_CODE = 1


def doctor(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    options = Parser(
        "clearhead doctor",
        ABOUT_DOCTOR,
        usage="clearhead doctor MODULE [options]",
        examples=(
            "clearhead doctor mymodel.py:GPT",
            "clearhead doctor models/mymodel.py:Encoder --no-causal --width 32",
        ),
        details=DOCTOR_DETAILS,
    )
    options.add_argument("module", metavar="MODULE", help="FILE.py:NAME or package.file:NAME")
    options.add_argument("--no-causal", action="store_true", help="allow attention to later tokens, as in an encoder")
    options.add_argument(
        "--width", type=reader(int), metavar="N", help="pass features of this width instead of token ids"
    )
    options.add_argument("--length", type=reader(int), metavar="N", help="tokens per sequence (default: 7)")
    options.add_argument(
        "--inputs", metavar="FILE.py:NAME", help="your own inputs: a tuple, a dict, or a function that returns one"
    )
    options.add_argument("--loss", metavar="FILE.py:NAME", help="check the shift of a loss(logits, ids)")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.insight.doctor.examine import examine
    from clearhead.insight.doctor.loading import load, load_value

    with redirect_stdout(sys.stderr):  # whatever the user's file prints
        module = load(args.module, Path.cwd())
        inputs = load_value(args.inputs, Path.cwd()) if args.inputs else None
        loss = load_value(args.loss, Path.cwd(), call_functions=False) if args.loss else None
        sizes = {"width": args.width, "length": args.length}
        try:
            report = examine(module, inputs, causal=not args.no_causal, loss=loss, name=args.module, **sizes)
        except SystemExit:
            raise ValueError(f"forward() of {args.module} exits Python") from None
    print(json_text(report.to_dict()) if args.json else format_report(report))
    return FAULT_EXIT_CODE if report.faults else 0


def format_report(report: "Report") -> str:
    """The report as a table, wrapped to the width of the terminal."""
    width = console().width
    size = max(len(finding.check) for finding in report.findings)
    lines = [*wrap(f"{report.module}: {report.call}", width, subsequent_indent="  "), ""]
    for finding in report.findings:
        verdict = "FAULT" if finding.verdict == "fault" else finding.verdict
        columns = f"{verdict:11}  {finding.check:{size}}  "
        lines += wrap(finding.text, width, initial_indent=columns, subsequent_indent=" " * len(columns))
    return "\n".join([*lines, "", report.summary(), *wrap(report.links(), width)])


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
    from clearhead.page.models import Catalog, Target, problem_of
    from clearhead.training.run_summary import summarize

    is_module = args.target is not None and is_module_path(args.target)
    if args.model and (args.target is None or is_module):
        raise ValueError("--model names the module of a run; try: clearhead open RUN --model FILE.py:NAME")
    target = None
    if is_module and not Path(file := args.target.rpartition(":")[0]).exists() and file.endswith(".py"):
        raise ValueError(f"no such file: {file}")
    if args.target is not None:
        path = None if is_module else find_run(args.target)
        if path is not None and not args.model and (problem := problem_of(path, summarize(path))):
            raise ValueError(problem)
        target = Target(path, args.target if is_module else args.model, image_shape(args.image))

    def announce(link: str) -> None:
        if not is_loopback(args.host):
            warn(EXPOSED.format(host=args.host, port=link.partition("/?")[0].rpartition(":")[2]).replace("\n", " "))
        print(
            f"Clearhead is running at\n\n  {link}\n\nKeep this link to yourself. Ctrl-C stops the server.", flush=True
        )

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
