"""timm, Hugging Face and vit-pytorch import torchvision, which stops beside a build of torch that its two compiled
operators were not made for. No transformer calls them: it is enough that they have a name."""

import importlib

import torch

try:
    importlib.import_module("torchvision")
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
