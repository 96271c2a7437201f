"""Train on a folder of your own images, one folder per class; here, the example draws them.

python examples/train_on_a_folder.py
"""

import random
from pathlib import Path

from PIL import Image, ImageDraw

import clearhead

FOLDER = Path("shapes")


def draw_shapes(n: int) -> None:
    """shapes/circle/0.png, shapes/square/0.png, shapes/cross/0.png, ..."""
    numbers = random.Random(0)
    for name in ("circle", "square", "cross"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            image = Image.new("RGB", (32, 32), "midnightblue")
            x, y, r = numbers.randint(9, 22), numbers.randint(9, 22), numbers.randint(5, 8)
            box, draw = (x - r, y - r, x + r, y + r), ImageDraw.Draw(image)
            if name == "circle":
                draw.ellipse(box, fill="gold")
            elif name == "square":
                draw.rectangle(box, fill="gold")
            else:
                draw.line((x - r, y, x + r, y), fill="gold", width=4)
                draw.line((x, y - r, x, y + r), fill="gold", width=4)
            image.save(FOLDER / name / f"{i}.png")


def main() -> None:
    draw_shapes(60)
    changes = {"data.folder": str(FOLDER), "data.validation": 20, "training.epochs": 12, "training.threads": 1}
    clearhead.train("folder", "shapes", changes=changes, resume=True)

    run = clearhead.open_run("shapes")
    print(f"\ntest accuracy: {run.evaluate()['accuracy']:.1%}, classes: {', '.join(run.classes)}")
    files = [FOLDER / name / "0.png" for name in run.classes]
    for file, prediction in zip(files, run.predict(files), strict=True):
        print(f"{file}: {prediction}")
    print("attention maps, mistakes and curves:", run.report("shapes.html"))


if __name__ == "__main__":
    main()
