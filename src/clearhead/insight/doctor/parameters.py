"""What the parameters of a forward() are for, told by their names. RULES is what the command's help says."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["sequence", "target", "memory", "same", "padding", "lengths", "attention", "causal", "labels"]
"""sequence: what is read; target: what a decoder has written; memory: what it attends to; same: keys and values of
self-attention; padding and lengths: which tokens are real; attention: who may see whom; causal: a switch"""

RULES = """\
  the first                        the sequence: ids if there is an nn.Embedding,
                                   else features, or images
  key, value after query           the same once more
  tgt, trg, decoder_input_ids ...  what a decoder has written; y and target too,
                                   if they are required
  memory, enc_out, context ...     what a decoder attends to, if required
  attention_mask, *padding_mask    which tokens are real: (batch, length) and such
  lengths, src_lengths, seq_lens   how many tokens are real
  mask, attn_mask, tgt_mask ...    who may see whom: (length, length) and such
  is_causal, causal                a switch, turned on if needed
  labels, targets                  the ids once more, if needed
  loss_mask=None, any other        its default; without one the module is refused"""

TARGET = re.compile(r"tgt|trg|(dec|decoder)_(x|input|inputs|input_ids)|(tgt|trg|target)_(ids|tokens|seq|input|inputs)")
EITHER = re.compile(r"y|target")
MEMORY = re.compile(r"memory|context|enc|encoded|(enc|encoder)_(src|out|output|outputs|states|hidden_states)")
LENGTHS = re.compile(r"(.*_)?(lengths|lens)")
PADDING = re.compile(r".*pad.*mask|(.*_)?(attention|input|token|valid)_mask")
ATTENTION = re.compile(r"(.*_)?mask")
NO_ATTENTION = re.compile(r"(.*_)?(loss|labels?|heads?|special_tokens?|completion|response)_mask")
"""those that weigh a loss, switch off whole heads, or say what a token is: left out unless they are required"""
CAUSAL = re.compile(r"is_causal|causal")
LABELS = re.compile(r"labels|targets")
QUERY, KEY_OR_VALUE = re.compile(r"q|query|queries"), re.compile(r"k|keys?|v|values?")

OF_TARGET = re.compile(r"(tgt|trg|target|dec|decoder)_.*")
OF_SOURCE = re.compile(r"(src|source|memory|context|enc|encoder|cross)_.*")
OF_MEMORY = re.compile(r"(memory|context|enc|encoder|cross)_.*")
"""masks of an encoder's output, which are left out where there is none"""
ACROSS = re.compile(r"(memory|context|cross)_.*")
"""of those, the ones that an encoder would not take for itself"""


@dataclass(frozen=True)
class Parameter:
    name: str
    role: Role
    is_required: bool


def parameters_of(forward: Callable[..., Any]) -> list[Parameter]:
    """Those that the doctor knows how to fill; refuses a forward() with a required one that it does not know."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        raise ValueError(
            "a module's forward() must have parameters that Python knows, got one without a signature; "
            "write a wrapper with forward(self, x)"
        ) from None
    named = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not named:
        raise ValueError(
            "a module's forward() must name its parameters, got none with a name; write a wrapper with forward(self, x)"
        )
    found = []
    for i, parameter in enumerate(named):
        is_required = parameter.default is parameter.empty
        role = "sequence" if i == 0 else role_of(parameter.name.lower(), named[0].name.lower(), is_required)
        if role in ("padding", "attention", "lengths") and isinstance(parameter.default, bool):
            role = None  # has_mask=True is no mask
        if role is not None:
            found.append(Parameter(parameter.name, role, is_required))
        elif is_required:
            raise ValueError(
                f"forward() has a parameter that no rule fills, {parameter.name!r}, which has no default; "
                "name a function that returns a wrapper whose forward(self, x) fills it (see clearhead doctor --help)"
            )
    if sequences(found)[1] is None:
        return [p for p in found if p.is_required or not OF_MEMORY.fullmatch(p.name.lower())]
    return found


def role_of(name: str, first: str, is_required: bool) -> Role | None:
    """Of any parameter but the first."""
    if KEY_OR_VALUE.fullmatch(name) and QUERY.fullmatch(first):
        return "same"
    if NO_ATTENTION.fullmatch(name) and not is_required:
        return None
    if TARGET.fullmatch(name):
        return "target"
    if EITHER.fullmatch(name):
        return "target" if is_required else "labels"
    if MEMORY.fullmatch(name):
        return "memory" if is_required else None
    rules: list[tuple[re.Pattern[str], Role]] = [
        (CAUSAL, "causal"),
        (LABELS, "labels"),
        (LENGTHS, "lengths"),
        (PADDING, "padding"),
        (ATTENTION, "attention"),
    ]
    return next((role for pattern, role in rules if pattern.fullmatch(name)), None)


def sequences(parameters: list[Parameter]) -> tuple[str, str | None]:
    """(the sequence whose places the outputs have, the one that it only reads from or None)"""
    by_role = {parameter.role: parameter.name for parameter in reversed(parameters)}
    if "target" in by_role:
        return by_role["target"], by_role["sequence"]
    return by_role["sequence"], by_role.get("memory")


def is_about_source(name: str, source: str | None) -> bool:
    """Whether a mask hides tokens of the source, where there is one. Of a decoder's masks, only those named so."""
    if source is None or OF_TARGET.fullmatch(name.lower()):
        return False
    return bool(OF_SOURCE.fullmatch(name.lower())) or not MEMORY.fullmatch(source.lower())


def is_across(name: str, source: str | None) -> bool:
    """Whether a mask stands between the two sequences: keys of the source, queries of the main one."""
    if source is None or not is_about_source(name, source):
        return False
    return bool(MEMORY.fullmatch(source.lower()) or ACROSS.fullmatch(name.lower()))
