"""The fixture `zoo`: all modules of zoo/*.py, by name. The files import each other, so they are loaded as a package."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).with_name("zoo")
PACKAGE = "doctor_zoo"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def zoo():
    spec = importlib.util.spec_from_file_location(PACKAGE, FOLDER / "__init__.py")
    sys.modules[PACKAGE] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    files = [importlib.import_module(f"{PACKAGE}.{name}") for name in ("attention", "decoders", "encoders", "layers")]
    return SimpleNamespace(**{name: x for file in files for name, x in vars(file).items() if isinstance(x, type)})
