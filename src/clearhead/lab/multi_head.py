"""Multi-head attention from C (e,n), with tokens as columns; and what its heads are like in a convolution."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_most, equals
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.softargmax import softargmax


def run(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 5, from_left: bool = True) -> Result:
    """from_left=False multiplies from the other side, Cᵀ W, which for square weights is Wᵀ C."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, n_heads, bias=False).double()
    C, *given = torch.randn(4, width, n_tokens, dtype=torch.float64)  # columns are tokens

    def heads(weight: Tensor) -> tuple[Tensor, ...]:
        return (weight if from_left else weight.T).chunk(n_heads)  # W_i (d,e)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """O_i = W_V,i v softargmax(beta (W_K,i k)ᵀ W_Q,i q), beta = 1/sqrt(d), (d,n) each"""
        found = []
        for W_Q, W_K, W_V in zip(*(heads(p.weight) for p in (layer.query, layer.key, layer.value)), strict=True):
            Q, K, V = W_Q @ q, W_K @ k, W_V @ v
            found.append(V @ softargmax(K.T @ Q, len(Q) ** -0.5, dim=0))
        return found

    def gap(made: Tensor, *inputs: Tensor) -> float:
        return (made - layer(*(x.T[None] for x in inputs))[0].T).abs().max().item()

    with torch.no_grad():
        assert isinstance(layer.output, nn.Linear)
        W_O, own = layer.output.weight, outputs(C, C, C)
        summed = torch.stack([part @ out for part, out in zip(W_O.chunk(n_heads, dim=1), own, strict=True)]).sum(0)
        return Result(
            (
                equals("rows of one head's output", len(own[0]), width // n_heads, 0),
                at_most("difference of W_O [O_1; ...; O_h] from the layer", gap(W_O @ torch.cat(own), C), 1e-12),
                at_most("difference of the sum of W_O,i O_i from it", gap(summed, C), 1e-12),
                at_most(
                    "for given Q, K and V: difference from the layer",
                    gap(W_O @ torch.cat(outputs(*given)), *given),
                    1e-12,
                ),
            )
        )


def run_groups(*, seed: int = 0, width: int = 8, n_heads: int = 4, length: int = 9, one_kernel: bool = False) -> Result:
    """one_kernel gives all heads the first one's weights: the mistake that heads are copies."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(n_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)  # as the weights of a query, they sum to 1
    v = torch.randn(1, n_heads, length, width // n_heads, generator=random, dtype=torch.float64)
    # Scores of each head by distance alone, around a circle: log of its kernel at -1, 0, 1 and -inf beyond.
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]  # (H,L,L)
    if one_kernel:
        scores = scores[:1].expand_as(scores)
    nothing = torch.zeros(1, n_heads, length, 1, dtype=torch.float64)
    attended = attend_reference(nothing, nothing, v, logit_bias=scores)[0]
    channels = v.transpose(2, 3).flatten(1, 2)  # (1,E,L): a head is a group of channels
    by_channel = kernels.repeat_interleave(width // n_heads, dim=0)[:, None]  # (E,1,3)
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)
    error = (attended.transpose(2, 3).flatten(1, 2) - convolved).abs().max().item()
    return Result((at_most("difference of heads that attend by distance from a grouped convolution", error, 1e-12),))


COLUMNS = Claim(
    slug="multi-head",
    kind="demonstration",
    rows=("R4.6",),
    lesson="Heads",
    statement="From C (e,n) each head projects once, from the left: W_i C; one W_O without an index mixes the outputs.",
    mistake="C W_i, from the right, and a W_O of its own for each head.",
    formula="Q_i = W_Q,i C (d,n), K_i, V_i likewise;  O_i = V_i softargmax(K_iᵀ Q_i / sqrt(d)) by columns (d,n);  "
    "H = W_O [O_1; ...; O_h], W_O (e, h d)",
    run=run,
    try_next="clearhead lab head-outputs",
)

GROUPS = Claim(
    slug="heads-as-groups",
    kind="demonstration",
    rows=("R4.7",),
    lesson="Heads",
    statement="Heads are to attention what groups with a kernel each are to a convolution: own pattern, own channels.",
    mistake="Heads repeat one pattern; a convolution has nothing like them.",
    least={"length": 3},
    formula="scores_h(i,j) = log w_h(j - i):  attention = grouped convolution with kernels w_h",
    run=run_groups,
    try_next="clearhead lab convolution",
)
