"""Random augmentation in a map-style dataset: a run that is stopped and resumed equals an uninterrupted one, exactly.

python examples/augmented_dataset.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import clearhead
from clearhead.training.evaluation import Progress


class NoisyStripes(Dataset[tuple[Tensor, int]]):
    """Images (1,8,8) with a horizontal (0) or a vertical (1) stripe, and new noise each time they are loaded."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = torch.zeros(1, 8, 8), index % 2
        stripe = index // 2 % 8
        image[0, :, stripe] = image[0, :, stripe] + label
        image[0, stripe, :] = image[0, stripe, :] + 1 - label
        return image + 0.5 * torch.randn(image.shape), label  # drawn from torch's generator: exact on resume


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def interrupt(progress: Progress) -> None:
    if progress.step == 20:
        raise KeyboardInterrupt


def train(folder: str, *, resume: bool = False, is_interrupted: bool = False) -> None:
    data, callbacks = NoisyStripes(), [interrupt] if is_interrupted else []
    settings = {"epochs": 4, "batch_size": 24, "threads": 1, "quiet": True}
    clearhead.fit(model, data, data, optimizer=sgd, callbacks=callbacks, dir=folder, resume=resume, **settings)


def main() -> None:
    train("runs/uninterrupted")
    try:
        train("runs/interrupted", is_interrupted=True)
    except KeyboardInterrupt:
        print("stopped at step 20")
    train("runs/interrupted", resume=True)
    a, b = (clearhead.open_run(f"runs/{name}", model=model).model for name in ("uninterrupted", "interrupted"))
    equal = all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    print("resumed; all weights are", "identical" if equal else "DIFFERENT")


if __name__ == "__main__":
    main()
