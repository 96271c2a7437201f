# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention from scratch
#
# Attention is a lookup that can be differentiated. This notebook builds it from four lines of PyTorch, breaks it in
# instructive ways, and ends with a small transformer that learns to reverse a sequence. It takes about a minute on
# one CPU core.

# %%
import math

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

import clearhead

_ = torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A lookup table, made soft
#
# A Python dict compares a query with its keys, finds the one that is equal, and returns its value. Suppose that
# keys and queries are vectors instead. "Equal" becomes "similar", and the natural measure of similarity is the dot
# product.

# %%
keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])  # three keys of width 2
values = torch.tensor([10.0, 20.0, 30.0])  # one value for each key
query = torch.tensor([0.9, 0.5])

scores = keys @ query
scores

# %% [markdown]
# A dict would now take the value with the largest score. Taking a maximum has no useful gradient, so attention
# takes a weighted mean instead. The softmax turns scores into weights that are positive and sum to 1.

# %%
weights = scores.softmax(0)
print("weights:", weights.numpy().round(3))
print(f"output:  {weights @ values:.2f}")

# %% [markdown]
# **Question.** Which query would return the mean of all values, 20? Which one would return almost exactly 10? Try
# your answers in the cell above.

# %% [markdown]
# ## One number between averaging and selecting
#
# Multiply the scores by a number beta before the softmax. With beta = 0 all weights are equal. As beta grows, the
# largest score takes everything, and we are back at the dict. Beta is an *inverse temperature*.

# %%
betas = torch.linspace(0, 10, 100)
curves = (betas[:, None] * scores).softmax(-1)

figure, axes = plt.subplots(figsize=(6, 3))
for i in range(3):
    axes.plot(betas, curves[:, i], label=f"key {i}, score {scores[i]:.1f}")
axes.set(xlabel="beta", ylabel="weight", ylim=(0, 1))
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Why 1/sqrt(d)
#
# The components of a random query and key have variance 1. Their dot product is a sum of d products, so its
# variance is d: scores grow with the width of the head, and the softmax becomes a selection before training has
# begun. Dividing by sqrt(d) undoes this.

# %%
for d in (4, 64, 1024):
    q, k = torch.randn(10_000, d), torch.randn(10_000, d)
    dots = (q * k).sum(-1)
    scaled = dots / math.sqrt(d)
    print(f"d = {d:4}   variance of q·k: {dots.var():7.1f}   after division by sqrt(d): {scaled.var():.2f}")

# %% [markdown]
# ## Attention, the whole of it
#
# Many queries at once are the rows of a matrix, and so are keys and values. The function below is the formula of
# Vaswani et al. (2017): softmax(Q Kᵀ / sqrt(d)) V.


# %%
def attention(q, k, v, mask=None):
    """q (Q,D), k (K,D), v (K,D) -> output (Q,D) and weights (Q,K). The mask is True where a query may attend."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


q, k, v = torch.randn(3, 6, 16)
output, weights = attention(q, k, v)
print("shapes:", tuple(output.shape), tuple(weights.shape), "  rows sum to", weights.sum(-1).numpy().round(6))

# %% [markdown]
# The library functions compute the same.

# %%
reference, _ = clearhead.attend_reference(q, k, v)
fused = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
print(f"difference from clearhead: {(output - reference).abs().max():.1e}")
print(f"difference from PyTorch:   {(output - fused).abs().max():.1e}")

# %% [markdown]
# ## Masks
#
# A language model predicts the next token, so token *i* must not see tokens after *i*. Setting their scores to
# minus infinity makes their weights exactly zero.

# %%
causal = torch.ones(6, 6, dtype=torch.bool).tril()
_, masked = attention(q, k, v, causal)

figure, (left, right) = plt.subplots(1, 2, figsize=(6, 3))
for axes, matrix, title in ((left, weights, "all keys"), (right, masked, "causal mask")):
    axes.imshow(matrix, vmin=0, vmax=1)
    axes.set(title=title, xlabel="key", ylabel="query")
figure.tight_layout()

# %% [markdown]
# A mask is a promise about the output, so test the promise: change the last token and see which outputs move.

# %%
k2, v2 = k.clone(), v.clone()
k2[-1] += 1
v2[-1] += 1
for name, mask in (("all keys", None), ("causal", causal)):
    change = (attention(q, k2, v2, mask)[0] - attention(q, k, v, mask)[0]).abs().amax(-1)
    print(f"{name:9}", change.numpy().round(3))

# %% [markdown]
# **Question.** With the causal mask, why is the last output the only one that moves? And what happens to a query
# whose keys are *all* masked? (`clearhead lab fully-masked-row` shows two possible answers.)

# %% [markdown]
# ## Attention does not know the order
#
# Nothing in the formula refers to a position. Shuffle the tokens and the outputs are shuffled in the same way, but
# they are otherwise unchanged: attention is *permutation-equivariant*.

# %%
x = torch.randn(6, 16)
order = torch.randperm(6)
shuffled_after = attention(x, x, x)[0][order]
shuffled_before = attention(x[order], x[order], x[order])[0]
print(f"difference: {(shuffled_after - shuffled_before).abs().max():.1e}, which is rounding")

# %% [markdown]
# That is why transformers add a *position embedding* to every token. The model below learns one.

# %% [markdown]
# ## Heads
#
# One softmax gives one pattern of weights. A layer with several heads splits its width into slices, attends in each
# of them with its own weights, and joins the outputs. `clearhead.MultiHeadAttention` is such a layer: its heads are
# a reshape.

# %%
layer = clearhead.MultiHeadAttention(16, num_heads=4)
x = torch.randn(1, 6, 16)


def split(t):
    """(B,L,16) -> (B,4,L,4): heads become a dimension of their own."""
    return t.unflatten(-1, (4, 4)).transpose(1, 2)


heads, head_weights = attention(split(layer.q_proj(x)), split(layer.k_proj(x)), split(layer.v_proj(x)))
by_hand = layer.out_proj(heads.transpose(1, 2).flatten(-2))
print(f"weights: {tuple(head_weights.shape)}   difference from the layer: {(by_hand - layer(x)).abs().max():.1e}")

# %% [markdown]
# ## Learning where to look
#
# Now a task in which each output depends on another position: reverse 12 digits. Output *i* must read input 11 − *i*.
# Nobody tells the model; it has to find out. The model is an embedding, a position table, one attention layer and a
# linear layer.


# %%
class Reverser(nn.Module):
    def __init__(self, width=32, length=12):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.pos_embed = nn.Parameter(0.1 * torch.randn(length, width))
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 10)

    def forward(self, ids):
        x = self.embed(ids) + self.pos_embed
        mixed, _ = attention(*self.qkv(x).chunk(3, -1))
        return self.head(mixed)


model = Reverser()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(150):
    ids = torch.randint(0, 10, (128, 12))
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

test_ids = torch.randint(0, 10, (1000, 12))
accuracy = (model(test_ids).argmax(-1) == test_ids.flip(1)).float().mean()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.4f}, accuracy on new sequences {accuracy:.1%}")

# %% [markdown]
# A loss of ln 10 = 2.30 is what guessing costs. What did the model learn? `clearhead.look` runs it once and returns
# the attention weights. It needs no change to the model: it recognized the softmax that you wrote.

# %%
trace = clearhead.look(model, test_ids[:1])
trace

# %%
(record,) = trace.values()
learned = record.weights()[0, 0].detach()

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.plot(losses)
left.axhline(math.log(10), color="gray", linestyle=":", label="guessing")
left.set(xlabel="step", ylabel="loss", title="training")
left.legend()
right.imshow(learned, vmin=0, vmax=1)
right.set(
    xlabel="key (input position)",
    ylabel="query (output position)",
    title="learned attention weights",
    xticks=range(0, 12, 2),
)
figure.tight_layout()

# %% [markdown]
# The weights lie on the anti-diagonal: output 0 reads input 11, output 1 reads input 10, and so on. The rule of the
# task has become visible in the weights.
#
# **Questions.**
#
# 1. Remove `self.pos_embed` from `forward` and train again. Which accuracy do you expect, and why is it not 10%?
# 2. Train on `ids.sort(1).values` instead of `ids.flip(1)`. Can one layer sort? What do its weights look like?
# 3. Add a causal mask to `attention(...)` in `forward`. Which half of the outputs can still be right?
#
# **Next.** `clearhead lab` tests claims like these: `clearhead lab positions` answers the first question with
# numbers, and
# `clearhead steps` computes attention by hand, step by step.
