"""Looking inside any PyTorch model: one ordinary forward pass, and the attention of every layer and head.

seen = look(model, images)
seen.output                                       # what the model answered
seen                                              # a table: address, kernel, heads, queries x keys
seen["blocks.3.attn"].weights(head=1, rows=[0])   # (B,1,1,K): computed only now, only this
seen.verify()                                     # largest |weights @ v - what the kernel returned| per layer
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from clearhead.insight.addresses import unknown
from clearhead.insight.calls import Call
from clearhead.insight.capture import LOOKED_FOR, captured
from clearhead.insight.seen import Seen, SeenLayer


def look(model: nn.Module, *args: Any, keep: Literal["all", "last"] | Sequence[str] = "all", **kwargs: Any) -> Seen:
    """model(*args, **kwargs), and what its attention did. The model, its output and its gradients are as without it.

    `keep` says of which layers the tensors are kept: "all", the "last", or a list of addresses.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"look needs an nn.Module and its inputs, got {type(model).__name__}; pass the model itself")
    if isinstance(keep, str) and keep not in ("all", "last"):
        raise ValueError(f'keep must be "all", "last" or a list of addresses, got {keep!r}; try keep=[{keep!r}]')
    addresses: list[str] = []
    layers: dict[str, SeenLayer] = {}

    def receive(address: str, call: Call, kernel: str, note: str) -> Tensor:
        if keep == "last":
            layers.clear()
        if isinstance(keep, str) or address in keep:
            layers[address] = SeenLayer(address, kernel, note, call)
        addresses.append(address)
        return call.raw_out

    with captured(model, receive):
        output = model(*args, **kwargs)
    if not addresses:
        raise LookupError(f"no attention was seen in {type(model).__name__}; looked for {LOOKED_FOR}")
    for address in () if isinstance(keep, str) else keep:
        if address not in addresses:
            raise unknown(address, addresses)
    return Seen(output, layers, addresses)
