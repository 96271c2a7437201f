"""The ward: all modules of ward/*.py, by name. Its files import each other, so that it is loaded as a package."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).with_name("ward")
NAME = "doctors_ward"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ward():
    spec = importlib.util.spec_from_file_location(NAME, FOLDER / "__init__.py")
    sys.modules[NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    files = [importlib.import_module(f"{NAME}.{name}") for name in ("attention", "decoders", "encoders", "layers")]
    return SimpleNamespace(**{name: x for file in files for name, x in vars(file).items() if isinstance(x, type)})
