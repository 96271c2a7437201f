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
# # Looking into somebody else's model
#
# Attention weights are the first thing one wants to see in a transformer, and the last thing that a fast one
# returns: fused kernels never store them. `clearhead.look` recovers them from an ordinary forward pass, for any
# PyTorch model. This notebook looks into `torch.nn`, edits a head, finds a bug in a causal mask, and then looks
# into timm. All weights are random, so nothing is downloaded; it takes a few seconds.

# %%
import math

import torch
from matplotlib import pyplot as plt
from torch import nn

import clearhead

_ = torch.manual_seed(0)

# %% [markdown]
# ## A model that returns no attention weights
#
# PyTorch's own encoder, with its default settings. Its layers call `nn.MultiheadAttention` with
# `need_weights=False`.

# %%
layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False).eval()
x = torch.randn(2, 10, 32)

trace = clearhead.look(encoder, x)
trace

# %% [markdown]
# The names are module paths, the same as in `named_modules()`. Weights are computed on request, for the heads and
# rows that you ask for: one row of one head is cheap even for thousands of tokens.

# %%
row = trace["layers.2.self_attn"].weights(head=1, rows=[0])
print(f"shape (batch, heads, queries, keys): {tuple(row.shape)}   sum over the keys: {row[0].sum():.4f}")

# %%
trace.plot()

# %% [markdown]
# **Question.** The three rows of the figure resemble each other, although the layers are different modules. Why?
# (`nn.TransformerEncoder` copies the layer that it receives, so that all its layers begin with the same weights.)

# %% [markdown]
# ## Can you trust it?
#
# The weights were computed outside the model, so they might not be those that the model used. There is a test:
# weights times values must give the output of the kernel. `verify` reports the largest difference for each layer.

# %%
trace.verify()

# %% [markdown]
# And looking must not change what is looked at.

# %%
print("difference of the outputs:", (encoder(x) - trace.output).abs().max().item())

# %% [markdown]
# ## Masks become visible
#
# Pass a causal mask as you would without Clearhead. In PyTorch's boolean convention for this layer, `True` means
# *masked*. The trace shows its effect.

# %%
masked = torch.ones(10, 10, dtype=torch.bool).triu(1)
causal_trace = clearhead.look(encoder, x, mask=masked)
causal_trace.plot("layers.0.self_attn", head=0)

# %% [markdown]
# **Question.** The first row has a single weight, and it is 1. Why can it not be anything else?

# %% [markdown]
# ## Change a head, and the output follows
#
# `clearhead.edit` replaces attention weights while the model runs. Which head of the last layer has the largest effect
# on the output, if it attends to all tokens equally?

# %%
effects = []
with torch.inference_mode():
    before = encoder(x)
    for head in range(4):
        with clearhead.edit(encoder, "layers.2.self_attn", head=head, pattern="uniform"):
            effects.append((encoder(x) - before).norm().item())

figure, axes = plt.subplots(figsize=(4, 2.5))
axes.bar(range(4), effects)
axes.set(xlabel="head of the last layer", ylabel="change of the output", xticks=range(4))
figure.tight_layout()

# %% [markdown]
# In a trained model the same loop tells which heads a task needs; `clearhead.head_importance` does it for all of
# them.

# %% [markdown]
# ## A model with a bug
#
# Somebody sends you this language model. Its loss is suspiciously low.


# %%
class TinyGPT(nn.Module):
    def __init__(self, vocab_size=20, width=32, context_length=16):
        super().__init__()
        self.tok_embed = nn.Embedding(vocab_size, width)
        self.pos_embed = nn.Embedding(context_length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.lm_head = nn.Linear(width, vocab_size)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tok_embed(ids) + self.pos_embed(torch.arange(length, device=ids.device))
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        visible = torch.ones(length, length, device=ids.device).tril(1)
        weights = scores.masked_fill(visible == 0, -math.inf).softmax(-1)
        return self.lm_head(x + weights @ v)


gpt = TinyGPT().eval()
ids = torch.randint(0, 20, (1, 8))
gpt_trace = clearhead.look(gpt, ids)
(record,) = gpt_trace.values()
record.plot(head=0)

# %% [markdown]
# Do you see it? Each query also attends to the token *after* it, which is the one that it has to predict. The
# doctor does not need to look at a picture. It changes a token and watches the outputs before it.

# %%
clearhead.examine(gpt, causal=True)

# %% [markdown]
# **Question.** Which character in the class above has to go? Change it, run the two cells again, and ask the
# doctor.

# %% [markdown]
# ## A model from a library
#
# The same three lines work for models that you did not write. timm's vision transformers use the fused kernel of
# PyTorch; so do those of Hugging Face. If timm is installed, look into one of its models.

# %%
try:
    import timm
except (ImportError, RuntimeError):  # not installed, or its torchvision was built for another version of torch
    timm = None
    print("timm cannot be imported; install it with: pip install timm")

# %%
if timm:
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=4).eval()
    vit_trace = clearhead.look(vit, torch.randn(1, 3, 224, 224))
    print(vit_trace)
    print("largest difference:", max(vit_trace.verify().values()))

# %% [markdown]
# The first of its 197 tokens is the class token. Its row, without the first entry, is a map of 14 × 14 patches.
# With random weights it is almost uniform; with pretrained weights (`pretrained=True`) it shows where the
# classifier looks.

# %%
if timm:
    rows = vit_trace["blocks.3.attn"].weights(rows=[0])[0, :, 0, 1:].detach().unflatten(1, (14, 14))
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.5))
    for head, panel in enumerate(panels):
        panel.imshow(rows[head])
        panel.set(title=f"class token, head {head}", xticks=[], yticks=[])
    figure.tight_layout()

# %% [markdown]
# **Next.** Replace the model above by one of yours. `clearhead doctor mymodel.py:GPT` examines it from the command
# line, and
# `clearhead.insight` has rollout, relevance and occlusion maps for whatever `look` finds.
