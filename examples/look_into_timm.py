"""Look into a vision transformer of timm: all attention weights of one ordinary forward pass, as a table and a figure.

pip install timm; python examples/look_into_timm.py
"""

import sys

import torch

import clearhead

try:
    import timm
except (ImportError, RuntimeError) as error:  # torchvision, which timm imports, may not fit the build of torch
    sys.exit(f"this example needs timm: {error}")

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224").eval()  # with pretrained=True, timm downloads weights
image = torch.randn(1, 3, 224, 224)

trace = clearhead.look(model, image)  # the model keeps its fused kernels
print(trace)

# 197 tokens: the class token, then 14 x 14 patches
weights = trace["blocks.11.attn"].weights()  # (batch, heads, queries, keys)
to_patches = weights[0, :, 0, 1:].unflatten(-1, (14, 14))  # what the class token attends to
for head, cells in enumerate(to_patches):
    row, column = divmod(int(cells.argmax()), 14)
    print(f"head {head}: the class token attends most to the patch in row {row}, column {column}")

print(f"largest error of weights @ v: {max(trace.verify().values()):.1e}")
trace.plot("blocks.11.attn").savefig("attention.png")
print("saved attention.png")
