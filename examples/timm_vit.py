"""A vision transformer of timm on a folder of images, which the example makes itself.

pip install timm; python examples/timm_vit.py
"""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import Dataset

import clearhead

try:
    import timm
except (ImportError, RuntimeError) as error:  # torchvision, which timm imports, may not fit the build of torch
    sys.exit(f"this example needs timm: {error}")

FOLDER, CLASSES, SIZE = Path("shapes"), ("circle", "square"), 32


def make_images(n: int) -> None:
    random = torch.Generator().manual_seed(0)
    for i in range(n):
        image = Image.new("RGB", (SIZE, SIZE), "black")
        x, y, radius = (int(torch.randint(8, (), generator=random)) + offset for offset in (10, 10, 5))
        draw, box = ImageDraw.Draw(image), (x - radius, y - radius, x + radius, y + radius)
        (draw.ellipse if i % 2 == 0 else draw.rectangle)(box, fill="white")
        path = FOLDER / CLASSES[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    def __init__(self, paths: list[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        pixels = torch.frombuffer(bytearray(Image.open(path).convert("RGB").tobytes()), dtype=torch.uint8)
        return pixels.view(SIZE, SIZE, 3).permute(2, 0, 1) / 255, CLASSES.index(path.parent.name)


def vit() -> nn.Module:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return timm.models.VisionTransformer(num_classes=len(CLASSES), **sizes)


make_images(160)
paths = sorted(FOLDER.glob("*/*.png"), key=lambda path: path.name)
train, val = ImageFolder(paths[:128]), ImageFolder(paths[128:])
clearhead.fit(vit, train, val, epochs=6, batch_size=16, lr=2e-3, snapshots=1, threads=1, dir="runs/timm", resume=True)
print(clearhead.open_run("runs/timm", model=vit).look(val[0][0][None]))
