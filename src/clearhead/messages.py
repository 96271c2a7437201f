"""Text for users in terminals and notebooks: escaping, suggestions for misspelled names, durations, JSON, safe streams.

In notebooks, `_repr_html_` shows HTML tables, and a progress bar is updated in place. All text is escaped: names of
modules, classes and files are not markup. Importing this module imports neither torch nor rich nor IPython.
"""

import difflib
import html
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

SYNONYMS = {
    "float32": ("fp32", "f32", "float"),
    "bf16": ("bfloat16",),
    "adamw": ("adam",),
    "cls": ("class", "class_token"),
    "mean": ("avg", "average"),
    "lr": ("learning_rate",),
    "epochs": ("num_epochs", "max_epochs", "num_train_epochs"),
    "dir": ("output_dir", "save_dir", "logdir"),
    "width": ("embed_dim", "hidden_size", "hidden_dim", "d_model", "n_embd", "dim"),
    "depth": ("num_layers", "num_hidden_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers"),
    "num_heads": ("num_attention_heads", "nhead", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "n_kv_head"),
    "mlp_dim": ("mlp_ratio", "intermediate_size", "dim_feedforward", "n_inner"),
    "image_size": ("img_size",),
    "in_channels": ("in_chans", "num_channels"),
    "num_classes": ("num_labels",),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len"),
    "dropout": ("drop_rate", "pos_drop_rate", "proj_drop_rate", "hidden_dropout_prob", "embd_pdrop", "resid_pdrop"),
    "attention_dropout": ("attn_drop_rate", "attention_probs_dropout_prob", "attn_pdrop"),
    "drop_path": ("drop_path_rate",),
    "norm": ("norm_first",),
    "norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    "layer_scale": ("init_values", "layerscale_value"),
    "num_register_tokens": ("reg_tokens",),
    "activation": ("act_layer", "hidden_act", "activation_function"),
    "pooling": ("global_pool", "pool"),
    "tie_weights": ("tie_word_embeddings",),
}
"""names used by other libraries, by ours; suggested only if ours is among the known names"""
OUR_NAMES = {other: ours for ours, others in SYNONYMS.items() for other in others}
MAX_REPR_LENGTH = 60
"""characters of an invalid value that an error message shows"""
TYPO_CUTOFF, ABBREVIATION_CUTOFF = 0.6, 0.5
"""minimum difflib ratios"""
LAYOUT = "\n\t"
"""control characters that are allowed in printed text"""
UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # C0 and C1 controls, DEL: cursor movement, colors, titles, clipboards
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls: reorder the displayed text
    r"\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    r"\u2028\u2029"  # line breaks to some programs
    r"\ud800-\udfff]"  # lone surrogates: bytes of a file name that are not UTF-8
    r"|(?<![^\x00-\x7f])[\u200c\u200d]"  # joiners after ASCII; emoji, Persian and Hindi need them
)
"""characters that control a terminal, or that make a text look like a different one"""
SECONDS_BETWEEN_UPDATES = 0.2
CELL = "text-align: {}; padding: 0.2em 0.8em; white-space: pre-wrap"


def printable(text: object, keep: str = "") -> str:
    r"""The text with control and invisible characters replaced by escapes such as \x1b.

    Everything else, such as kᵀ, ü, 猫 and emoji, is unchanged, and so are the characters in `keep`. Without `keep`, the
    result is a single line, so that a name cannot forge another line of output.
    """
    return UNSAFE.sub(lambda match: match[0] if match[0] in keep else escape(match[0]), str(text))


def escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def short_repr(value: object) -> str:
    """`repr(value)`, shortened to MAX_REPR_LENGTH characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with thousands of digits, or deeply nested lists
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[: MAX_REPR_LENGTH - 3]}..."


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None if none is similar.

    In order of preference: a name that differs only in case, "-" and "_"; a synonym from another library; a typo; a
    name that starts with `name` or contains it (gpt2 -> gpt2_small); an abbreviation with the same first letter.
    """
    known = {normalize_name(candidate): candidate for candidate in reversed(list(names))}  # the first of equals wins
    word, keys = normalize_name(name), list(reversed(known))
    if word in known:
        return known[word]
    if OUR_NAMES.get(word) in known:
        return known[OUR_NAMES[word]]
    typos = difflib.get_close_matches(word, keys, n=1, cutoff=TYPO_CUTOFF)
    longer = sorted((key for key in keys if len(word) > 2 and word in key), key=lambda key: not key.startswith(word))
    same_initial = [key for key in keys if key[:1] == word[:1]]
    abbreviations = difflib.get_close_matches(word, same_initial, n=1, cutoff=ABBREVIATION_CUTOFF)
    return next((known[key] for key in [*typos, *longer, *abbreviations]), None)


def normalize_name(name: str) -> str:
    return name.lower().replace("-", "_")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The suffix of an error message: `; did you mean X?`, or "" if no name is similar."""
    closest = closest_name(str(name), names)
    return f"; did you mean {closest}?" if closest else ""


def unknown_name(kind: str, name: object, names: Iterable[str]) -> LookupError:
    """An error for a name that is not among `names`. The suggestion precedes the list, which may be long."""
    names = list(names)
    closest = closest_name(str(name), names)
    hint = f"did you mean {closest}? Choose from" if closest else "choose from"
    return LookupError(f"unknown {kind} {name!r}; {hint} {', '.join(names)}")


def duration(seconds: float) -> str:
    """A duration in human-readable units: 23 ms, 3.6 s, 44 s, 5 min 32 s, 42 min, 1 h 33 min, 3 d 4 h."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 120:
        return f"{round(seconds)} s"
    if round(seconds) < 600:
        return in_two_units(round(seconds), "min", 60, "s")
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return in_two_units(minutes, "h", 60, "min")
    return in_two_units(round(seconds / 3600), "d", 24, "h")


def in_two_units(count: int, large: str, ratio: int, small: str) -> str:
    quotient, remainder = divmod(count, ratio)
    return f"{quotient:,} {large} {remainder} {small}" if remainder else f"{quotient:,} {large}"


def round_count(number: float) -> str:
    """A number with three significant digits, never in scientific notation: 0.25, 12.3, 5,560."""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def json_text(value: Any, indent: int | None = 2) -> str:
    """Valid ASCII JSON for `--json`. NaN and infinity, which JSON cannot represent, become null."""
    return json.dumps(finite_or_none(value), indent=indent, allow_nan=False)


def finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite_or_none(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def safe_console(*, width: int | None = None, stderr: bool = False) -> "Console":
    """A rich console for untrusted text: `[red]` and `:smile:` are printed literally, control characters are escaped.

    Colors come from styles only. The text is escaped before its style becomes a terminal sequence. In a notebook it
    writes plain text to stdout, as print does; rich would display each line as an HTML block of its own.
    """
    import rich.console
    from rich.segment import Segment

    class SafeConsole(rich.console.Console):
        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            for segment in super().render(renderable, options):
                if segment.control:  # from rich itself, for example to move the cursor of a progress bar
                    yield segment
                else:
                    yield Segment(printable(segment.text, keep=LAYOUT), segment.style)

    return SafeConsole(width=width, stderr=stderr, highlight=False, emoji=False, markup=False, force_jupyter=False)


def is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. The IPython shell of a terminal is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return hasattr(shell, "kernel")


class EscapedStream:
    """A text stream that escapes control characters instead of sending them to the terminal.

    rich writes its own escape sequences, such as colors, to `rich_proxied_file`; `safe_console` has escaped the text
    before.
    """

    def __init__(self, stream: "TextIO | FaultTolerantStream"):
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text, keep=LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class FaultTolerantStream:
    """A text stream that discards all output after its first failure (full disk, closed pipe, lost terminal).

    `on_failure` is called once, with the reason. Training therefore survives the loss of its output.
    """

    def __init__(self, stream: TextIO, on_failure: Callable[[str], None] = lambda reason: None):
        self.stream, self.on_failure, self.has_failed = stream, on_failure, False

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, action: Callable[[], object]) -> None:
        if self.has_failed:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.has_failed = True
            discard_buffer(self.stream)
            self.on_failure(getattr(error, "strerror", None) or str(error))

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":  # otherwise rich would bypass this stream
            raise AttributeError(name)
        return getattr(self.stream, name)


def discard_buffer(stream: TextIO) -> None:
    """Discard buffered text after a failed write: it would fail again at each flush, and at exit (exit code 120)."""
    with suppress(OSError, ValueError, AttributeError):  # a stream without a file descriptor has no such buffer
        descriptor = stream.fileno()
        saved, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, descriptor)
            stream.flush()
        finally:
            os.dup2(saved, descriptor)
            os.close(saved)
            os.close(null)


def open_standard_descriptors() -> None:
    """Open the file descriptors 0, 1 and 2 if the caller has closed them.

    Otherwise the next file to be opened, such as a checkpoint, would get one of these numbers, and with it everything
    that is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def escaped(text: object) -> str:
    """Text as HTML. Markup, control characters and invisible characters are shown, not interpreted."""
    return html.escape(printable(text, keep="\n"))


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    footer: str = "",
    right: Collection[int] = (),
) -> str:
    """A table with a caption above and a footer below; the columns in `right` are right-aligned."""

    def line(cells: Sequence[object], tag: str) -> str:
        styles = [CELL.format("right" if i in right else "left") for i in range(len(cells))]
        pairs = zip(cells, styles, strict=True)
        return "<tr>" + "".join(f'<{tag} style="{style}">{escaped(text)}</{tag}>' for text, style in pairs) + "</tr>"

    return "".join(
        [
            f"<p>{escaped(caption)}</p>" if caption else "",
            "<table>",
            f"<thead>{line(header, 'th')}</thead>" if header else "",
            f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>",
            f"<p>{escaped(footer).replace(chr(10), '<br>')}</p>" if footer else "",
        ]
    )


class NotebookBar:
    """A progress bar in the output of a cell, which is replaced at each update, so that nothing is shown twice."""

    def __init__(self, total: int, completed: int = 0):
        from IPython.display import display

        self.total, self.completed, self.metrics, self.updated = total, completed, "", time.monotonic()
        self.handle: Any = display(self, display_id=True)

    def update(self, completed: int, metrics: str | None = None, *, force: bool = False) -> None:
        """Show new values, several times a second at most."""
        self.completed, self.metrics = completed, self.metrics if metrics is None else metrics
        now = time.monotonic()
        if force or now - self.updated >= SECONDS_BETWEEN_UPDATES:
            self.updated = now
            self.handle.update(self)

    def __repr__(self) -> str:
        return f"{self.completed}/{self.total}  {printable(self.metrics)}".rstrip()

    def _repr_html_(self) -> str:
        return f'<progress value="{self.completed}" max="{self.total}"></progress> {escaped(self)}'


def align_columns(table: list[list[str]], right: Collection[int]) -> list[str]:
    """The lines of a table in plain text; the columns in `right` are right-aligned."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    cells = [
        [x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))]
        for line in table
    ]
    return ["  ".join(line).rstrip() for line in cells]
