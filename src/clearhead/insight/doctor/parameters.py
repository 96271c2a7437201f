"""What the parameters of a forward() are for, told by their names. RULES is what the command's help says."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["sequence", "target", "memory", "same", "padding", "lengths", "attention", "causal", "labels"]
"""sequence: what is read; target: what a decoder writes; memory: what it attends to; same: keys and values of
self-attention; padding and lengths: which tokens are real; attention: who may see whom; causal: a switch"""

RULES = """\
  first parameter     the sequence: ids where there is an nn.Embedding, else
                      features (or images); after query: key and value are the same
  tgt, target, trg, y, decoder_input_ids ...      what the decoder has written
  memory, enc_out, encoder_hidden_states ...      what the decoder attends to
  attention_mask, *padding_mask, *pad_mask ...    which tokens are real
  lengths, src_lengths, seq_lens ...              how many tokens are real
  mask, attn_mask, src_mask, tgt_mask ...         who may see whom
  is_causal, causal                               a switch, turned on if needed
  labels, targets                                 the same ids, if needed
  any other           its default; without one the module can't be called"""

TARGETS = {
    "tgt",
    "target",
    "trg",
    "y",
    "decoder_input_ids",
    "decoder_input",
    "decoder_inputs",
    "dec_input",
    "dec_inputs",
}
TARGET = re.compile(r"(tgt|trg|target)_(ids|tokens|seq|input|inputs|input_ids)")
MEMORY = {
    "memory",
    "enc_out",
    "enc_output",
    "encoder_out",
    "encoder_output",
    "encoder_outputs",
    "encoder_hidden_states",
}
LABELS = {"labels", "targets"}
PADDING = re.compile(r".*pad.*mask|(.*_)?(attention|input|token|valid)_mask")
LENGTHS = re.compile(r"(.*_)?(lengths|lens)")
ATTENTION = re.compile(r"(.*_)?mask")
CAUSAL = {"is_causal", "causal"}
OF_TARGET = re.compile(r"(tgt|trg|target|dec|decoder)_.*")
OF_SOURCE = re.compile(r"(src|source|memory|enc|encoder|cross)_.*")


@dataclass(frozen=True)
class Parameter:
    name: str
    role: Role
    is_required: bool


def parameters_of(forward: Callable[..., Any]) -> list[Parameter]:
    """Those that the doctor knows how to fill; refuses a forward() with a required one that it does not know."""
    named = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not named:
        raise ValueError(
            "a module's forward() must name its parameters, got none with a name; write a wrapper with forward(self, x)"
        )
    found = []
    for i, parameter in enumerate(named):
        role = role_of(parameter.name, i, named[0].name)
        is_required = parameter.default is parameter.empty
        if role is not None:
            found.append(Parameter(parameter.name, role, is_required))
        elif is_required:
            raise ValueError(
                f"forward() has a parameter that no rule fills, {parameter.name!r}, which has no default; "
                "name a function that returns a wrapper whose forward(self, x) fills it (see clearhead doctor --help)"
            )
    return found


def role_of(name: str, place: int, first: str) -> Role | None:
    name = name.lower()
    if name in TARGETS or TARGET.fullmatch(name):
        return "target" if place else "sequence"
    if place == 0:
        return "sequence"
    if name in ("key", "value", "k", "v", "keys", "values") and first.lower() in ("query", "q", "queries"):
        return "same"
    if name in MEMORY:
        return "memory"
    if name in CAUSAL:
        return "causal"
    if name in LABELS:
        return "labels"
    for pattern, role in ((LENGTHS, "lengths"), (PADDING, "padding"), (ATTENTION, "attention")):
        if pattern.fullmatch(name):
            return role  # type: ignore[return-value]
    return None


def sequences(parameters: list[Parameter]) -> tuple[str, str | None]:
    """(the sequence whose places the outputs have, the one that it only reads from or None)"""
    by_role = {parameter.role: parameter.name for parameter in reversed(parameters)}
    if "target" in by_role:
        return by_role["target"], by_role["sequence"]
    return by_role["sequence"], by_role.get("memory")


def is_about_source(name: str, main: str, source: str | None) -> bool:
    """Whether a mask hides tokens of the source, where there is one."""
    if source is None or OF_TARGET.fullmatch(name.lower()):
        return False
    return bool(OF_SOURCE.fullmatch(name.lower())) or role_of(source, 1, main) != "memory"
