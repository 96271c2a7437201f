"""Layers under other names: feed-forward and patches as convolutions, attention as message passing on a graph."""

import torch

from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.constructions import feedforward_as_convolutions, message_passing, patches_as_convolution
from clearhead.lab.reach import inputs_seen
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.patches import PatchTokens


def run_feedforward(*, seed: int = 0, width: int = 8, n_tokens: int = 5, attention: bool = False) -> Result:
    """attention asks of attention what holds of the feed-forward net: the mistake that places are mixed."""
    torch.manual_seed(seed)
    net, x = FeedForward(width, 4 * width).double(), torch.randn(2, n_tokens, width, dtype=torch.float64)
    layer = MultiHeadAttention(width, 1).double() if attention else net
    with torch.no_grad():
        convolved = feedforward_as_convolutions(net)(x.mT).mT
        error = (convolved - layer(x)).abs().max().item()
    return Result(
        (
            at_most("difference from two 1x1 convolutions", error, 1e-12),
            equals("places that the answer at one place depends on", inputs_seen(layer, x[:1]), 1, 0),
        )
    )


def run_patches(*, seed: int = 0, width: int = 8, patch: int = 4, side: int = 3, stride: int = 0) -> Result:
    """stride is the patch size unless given."""
    torch.manual_seed(seed)
    tokens, images = PatchTokens(3, width, patch).double(), torch.randn(2, 3, side * patch, side * patch).double()
    conv = patches_as_convolution(tokens)
    conv.stride = (stride or patch, stride or patch)
    with torch.no_grad():
        convolved = conv(images).flatten(2).mT
        cut = tokens(images)
    error = (convolved - cut).abs().max().item() if convolved.shape == cut.shape else float("inf")
    return Result((at_most("difference of cut and projected patches from the convolution", error, 1e-12),))


def run_graph(
    *, seed: int = 0, width: int = 8, n_nodes: int = 7, share: float = 0.4, mask_edges: bool = True
) -> Result:
    """share of the edges of a random graph; mask_edges=False attends to all nodes instead."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(n_nodes, n_nodes, generator=random) < share
    edges[0] = False
    edges[0, 1] = True
    masked = attend_reference(q, k, v, edges if mask_edges else None, beta=1.0)[0]
    complete = attend_reference(q, k, v, beta=1.0)[0]
    return Result(
        (
            at_most(
                "difference on the complete graph", (message_passing(v, q @ k.T) - complete).abs().max().item(), 1e-12
            ),
            at_most(
                "difference on a random graph", (message_passing(v, q @ k.T, edges) - masked).abs().max().item(), 1e-12
            ),
            at_least("edges that the graph lacks", int((~edges).sum()), 1),
        )
    )


FEEDFORWARD = Claim(
    slug="feed-forward",
    kind="demonstration",
    rows=("R4.13",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="The feed-forward net is the same at each position: two 1x1 convolutions with an activation between.",
    mistake="It mixes positions.",
    formula="max(0, x W_1 + b_1) W_2 + b_2 = conv_1x1(max(0, conv_1x1(x)))",
    run=run_feedforward,
    try_next="clearhead lab feed-forward --attention true",
    least={"n_tokens": 2},
)

PATCHES = Claim(
    slug="patches",
    kind="demonstration",
    rows=("R4.15",),
    lesson="Images and convolutions",
    statement="Cutting an image into patches and projecting them is a convolution whose stride is its kernel's size.",
    mistake="A vision transformer has no convolution.",
    formula="unfold(image) W = conv(image, W, stride = patch)",
    run=run_patches,
    try_next="clearhead lab patches --stride 2",
)

GRAPH = Claim(
    slug="graph",
    kind="demonstration",
    rows=("R3.4",),
    lesson="What attention can compute",
    statement="Attention passes messages on a fully connected graph; with the edges as mask, on any graph.",
    mistake="Attention and graph networks are different things.",
    formula="h_i = sum over edges (i,j) of softargmax_j(q_i·k_j) v_j",
    run=run_graph,
    try_next="clearhead lab graph --share 0.1",
    least={"n_nodes": 2, "share": 0},
    most={"share": 1},
)
