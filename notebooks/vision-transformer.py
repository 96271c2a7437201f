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
# # A vision transformer on digits, and what it attends to
#
# A transformer reads a sequence. An image becomes one if we cut it into patches. This notebook trains a small
# vision transformer on MNIST, which comes with the package, and then asks where it looks and whether that matters.
# It takes about a minute on one CPU core.

# %%
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import clearhead
from clearhead import insight
from clearhead.tasks import Mnist

# %% [markdown]
# ## The digits
#
# An image has 28 × 28 gray pixels. Cut into patches of 4 × 4, it has 7 × 7 = 49 tokens.

# %%
data = Mnist().load(seed=0)
images, labels = data.test.get_batch(torch.arange(8))
print("images", tuple(images.shape), images.dtype, "  labels", labels.tolist())


# %%
def show(panel, image, title=""):
    panel.imshow(image, cmap="gray")
    panel.set(title=title, xticks=[], yticks=[])


figure, panels = plt.subplots(1, 8, figsize=(9, 1.5))
for panel, image, label in zip(panels, images, labels, strict=True):
    show(panel, image[0], str(label.item()))
figure.tight_layout()

# %%
patches = images[0, 0].unfold(0, 4, 4).unfold(1, 4, 4)  # (7,7,4,4)
figure, grid = plt.subplots(7, 7, figsize=(3, 3))
for row in range(7):
    for column in range(7):
        grid[row, column].imshow(patches[row, column], cmap="gray", vmin=0, vmax=255)
        grid[row, column].axis("off")

# %% [markdown]
# **Question.** Could you still recognize the digit if somebody shuffled the 49 patches? Could the model? We shall
# see.

# %% [markdown]
# ## Training
#
# A short run of the recipe `mnist`: 150 steps of 128 images. (`clearhead train mnist` takes longer and reaches
# 99%.)

# %%
changes = {"training.steps": 150, "training.threads": 1, "data.limit": 20_000, "optimizer.warmup": 20}
clearhead.train("mnist", "notebook", changes=changes)

# %%
run = clearhead.open_run("runs/notebook")
run

# %%
records = [record for record in run.metrics if record["kind"] == "train"]
figure, axes = plt.subplots(figsize=(6, 2.5))
axes.plot([record["step"] for record in records], [record["loss"] for record in records])
axes.set(xlabel="step", ylabel="training loss", yscale="log")
figure.tight_layout()

# %% [markdown]
# ## The model
#
# Two blocks of width 64 with two heads each: few enough heads to look at all of them. The patches are embedded by a
# small convolutional stem. The last layer is *attention pooling*: one learned query reads the 49 tokens, and its
# output is classified. Where this query looks is where the classifier looks.

# %%
clearhead.shapes(run.config.model)

# %% [markdown]
# ## What does it predict?

# %%
predictions = run.predict(images)
figure, panels = plt.subplots(1, 8, figsize=(9, 1.7))
for panel, image, prediction in zip(panels, images, predictions, strict=True):
    show(panel, image[0], str(prediction))
figure.tight_layout()

# %% [markdown]
# ## Where does it look?
#
# `run.look` runs the model once on one image and records the attention of every layer.

# %%
trace = run.look(images[0])
trace

# %% [markdown]
# The pooling query has one row of weights for each head. Fold the 49 numbers back into a 7 × 7 grid and lay them
# over the digit.

# %%
pooled = trace["pool.attn"].weights()[0, :, 0].detach().unflatten(1, (7, 7))  # (heads,7,7)

figure, panels = plt.subplots(1, 1 + len(pooled), figsize=(2.5 * (1 + len(pooled)), 2.8))
show(panels[0], images[0, 0], "image")
for head, panel in enumerate(panels[1:]):
    show(panel, images[0, 0], f"pooling, head {head}")
    panel.imshow(pooled[head], extent=(-0.5, 27.5, 27.5, -0.5), alpha=0.6)
figure.tight_layout()

# %% [markdown]
# The blocks before the pooling have one row of weights for each of the 49 patches. Here are both heads of the first
# block. A patch that attended only to itself would draw a diagonal. What do you see instead?

# %%
trace.plot("blocks.0.attn")

# %% [markdown]
# ## Does it matter where it looks?
#
# A map of attention weights is a hypothesis. The test is an intervention: hide a patch and see whether the
# probability of the predicted class drops. This is *occlusion*. Compare it with two maps that use the weights
# alone.

# %%
x = run.normalize(images[:1])
predicted = run.model(x).argmax(-1)
full_trace = clearhead.look(run.model, x)

rollout = insight.output_map(insight.rollout(full_trace), class_token=False).unflatten(1, (7, 7))
occlusion = insight.occlusion(run.model, x, (7, 7), predicted)

maps = {"pooling weights": pooled.mean(0), "rollout": rollout[0].detach(), "occlusion": occlusion[0]}
figure, panels = plt.subplots(1, 3, figsize=(8, 2.8))
for panel, (name, values) in zip(panels, maps.items(), strict=True):
    show(panel, images[0, 0], name)
    panel.imshow(values, extent=(-0.5, 27.5, 27.5, -0.5), alpha=0.6)
figure.tight_layout()

# %% [markdown]
# **Question.** Where do the maps disagree? A patch can receive much attention without being needed, because its
# neighbors say the same. It can also be needed without receiving attention from the pooling query, because an
# earlier layer has already moved its content elsewhere.

# %% [markdown]
# ## Which heads does it need?
#
# The same idea for heads: replace the output of one head by zero and measure the loss on 500 test images.

# %%
test_images, test_labels = data.test.get_batch(torch.arange(500))
test_x = run.normalize(test_images)


def loss(logits):
    return F.cross_entropy(logits, test_labels)


importance = clearhead.head_importance(run.model, test_x, loss)
print("increase of the loss when a head is removed:")
for name, row in zip(full_trace, importance, strict=True):
    print(f"  {name:14}", " ".join(f"{value:7.3f}" for value in row.tolist()))

# %% [markdown]
# ## Shuffled patches
#
# Back to the question from the beginning. Shuffle the patches of every test image in the same way.

# %%
order = torch.randperm(49, generator=torch.Generator().manual_seed(0))


def shuffle_patches(x):
    """(B,1,28,28) -> the same with its 49 patches in another order."""
    cells = F.unfold(x, 4, stride=4)  # (B,16,49)
    return F.fold(cells[:, :, order], (28, 28), 4, stride=4)


with torch.inference_mode():
    for name, inputs in (("as they are", test_x), ("shuffled", shuffle_patches(test_x))):
        accuracy = (run.model(inputs).argmax(-1) == test_labels).float().mean()
        print(f"{name:12} {accuracy:.1%}")

figure, panels = plt.subplots(1, 4, figsize=(6, 1.7))
for panel, image in zip(panels, shuffle_patches(test_x[:4]), strict=True):
    show(panel, image[0])
figure.tight_layout()

# %% [markdown]
# The position embeddings (and, in this recipe, a convolutional stem that looks across the borders of patches) tie
# the model to the arrangement. Without positions and without a stem, the logits of a vision transformer with mean
# pooling would not change at all: `clearhead lab learned-positions` shows it.
#
# **Questions.**
#
# 1. Train with `"model.patch_embed": "patch"` and `"model.pos_embed": "none"` in `changes`. Which accuracy does it
#    reach, and what happens to it when the patches are shuffled?
# 2. Look at a digit that the model gets wrong (`clearhead predictions runs/notebook` shows the most confident
#    mistakes). Does its map explain the mistake?
# 3. The recipe shifts its training images at random. `clearhead lab augmentation` measures what that is worth. Guess
#    first.
