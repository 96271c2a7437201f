"""A small module with dropout, batch norm and attention, and a data set with random augmentation."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

N, LENGTH, WIDTH, CLASSES = 60, 5, 8, 3


class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.norm(x.mT).mT).mean(1))


class Augmented(Dataset):
    """Sequences whose class is the largest of three features, with noise that is drawn from torch's generator."""

    def __init__(self, n=N, seed=0):
        self.x = torch.randn(n, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.y = self.x.mean(1)[:, :CLASSES].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(LENGTH, WIDTH), self.y[i]


@pytest.fixture
def net():
    return Net


@pytest.fixture
def data():
    return Augmented()


@pytest.fixture
def tensors(data):
    return data.x, data.y


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
