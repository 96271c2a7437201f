"""`clearhead look` plots the attention of a run; `clearhead doctor` examines the user's own module."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, reader
from clearhead.messages import json_text

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
    args = options.parse(argv)
    check_one_input(args)
    if args.training_dynamics:
        from clearhead.inference.explain import plot_training_dynamics

        print_figures(plot_training_dynamics(args.run, args.out, announce_drawing))
        return

    from clearhead.cli.options import say, warn, warn_if_unfinished
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
    from clearhead.cli.options import say

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
    from clearhead.cli.options import console

    width = console().width
    size = max(len(finding.check) for finding in report.findings)
    lines = [*wrap(f"{report.module}: {report.call}", width, subsequent_indent="  "), ""]
    for finding in report.findings:
        verdict = "FAULT" if finding.verdict == "fault" else finding.verdict
        columns = f"{verdict:11}  {finding.check:{size}}  "
        lines += wrap(finding.text, width, initial_indent=columns, subsequent_indent=" " * len(columns))
    return "\n".join([*lines, "", report.summary(), *wrap(report.links(), width)])
