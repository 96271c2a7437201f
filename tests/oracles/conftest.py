"""The other libraries are imported by the tests that use them. timm and Hugging Face import torchvision, which stops
beside a build of torch that its two compiled operators were not made for; no transformer calls them, so a name does."""

import importlib

import torch


def pytest_configure():
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass
