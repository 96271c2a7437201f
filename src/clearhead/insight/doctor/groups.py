"""Which masks hide one sequence: they are given together, and written in the same way.

Dims: B batch, Q queries, K keys.
"""

from dataclasses import dataclass

from torch import Tensor

from clearhead.insight.doctor.calling import Called
from clearhead.insight.doctor.encodings import LENGTHS, OF_BOTH, OF_TOKENS, Encoding, encodings
from clearhead.insight.doctor.parameters import MEMORY, OF_MEMORY, Parameter, is_across
from clearhead.insight.doctor.subject import Masks


@dataclass(frozen=True)
class Group:
    """Parameters that together hide tokens of one sequence, and how they are written, once that is known."""

    names: tuple[str, ...]
    sequence: str
    encoding: Encoding | None = None

    def masks(self, seen: Tensor, encoding: Encoding | None = None) -> Masks:
        """All of them with one mask (B,K), or (B,Q,K)."""
        written = encoding or self.encoding
        assert written is not None
        seen = seen if seen.dim() == 3 else seen[:, None].expand(-1, seen.shape[-1], -1)
        return dict.fromkeys(self.names, (written, seen))

    def spelled(self, encoding: Encoding) -> str:
        return f"{' and '.join(self.names)}: {encoding}"


def groups(called: Called) -> list[Group]:
    """The masks of each sequence together; lengths alone. Masks of pairs will do where there is none of tokens."""
    plan = called.subject.plan
    found: list[Group] = []
    if not called.subject.has_tokens:
        return found
    for sequence in [plan.main] if plan.source is None else [plan.source, plan.main]:
        own = [p for p in called.parameters if plan.keys_of(p.name) == sequence]
        tokens = tuple(p.name for p in own if p.role == "padding")
        lengths = [(p.name,) for p in own if p.role == "lengths"]
        found += [Group(names, sequence) for names in [tokens, *lengths] if names]
        if not tokens and not lengths and (pairs := pairs_of(own, sequence == plan.source)):
            found.append(Group(pairs, sequence))
    return found


def pairs_of(own: list[Parameter], is_source: bool) -> tuple[str, ...]:
    """The first mask of pairs that a sequence has for itself; of a source, those of its memory too."""
    names = [p.name for p in own if p.role == "attention"]
    of_memory = [name for name in names if OF_MEMORY.fullmatch(name.lower())]
    return (*[name for name in names if name not in of_memory][:1], *(of_memory if is_source else []))


def options(group: Group, called: Called) -> list[Encoding]:
    if all(p.role == "lengths" for p in called.parameters if p.name in group.names):
        return [LENGTHS]
    shapes = OF_BOTH if set(group.names) & set(called.subject.plan.causal) else OF_TOKENS
    takes_pairs = all(p.role == "attention" for p in called.parameters if p.name in group.names)
    return list(encodings((*shapes, "(Q,K)") if takes_pairs else shapes))


def is_only_across(called: Called, group: Group) -> bool:
    """Whether the masks of pairs hide what an encoder inside returns, and nothing hides what it reads."""
    plan = called.subject.plan
    is_given = plan.source is not None and MEMORY.fullmatch(plan.source.lower())
    pairs = {p.name for p in called.parameters if p.role == "attention"}
    return not is_given and all(name in pairs and is_across(name, plan.source) for name in group.names)
