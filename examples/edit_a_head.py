"""Change what a head attends to, and see what the model does then.

A model with one head learns to reverse digits: position i attends to position 15 - i. If that attention is replaced by
the identity, the same weights copy the digits instead.

python examples/edit_a_head.py
"""

import torch
from torch import Tensor

import clearhead

NAME, LENGTH = "blocks.0.attn", 16


def fraction(outputs: Tensor, expected: Tensor) -> str:
    return f"{(outputs.argmax(-1) == expected).float().mean():6.1%}"


def main() -> None:
    clearhead.train("reverse", "reverse", changes={"training.threads": 1}, resume=True)
    model = clearhead.load("reverse")
    ids = torch.randint(0, 10, (1000, LENGTH), generator=torch.Generator().manual_seed(1))
    identity = torch.eye(LENGTH)
    patterns = {
        "uniform": "uniform",
        "removed": "zero",
        "sharpened": lambda weights: (8 * weights.log()).softmax(-1),
        "identity": identity,
        "mirror": identity.flip(0),
    }

    print("\nattention    reversed  copied")
    with torch.no_grad():
        outputs = model(ids)
        print(f"{'as learned':12} {fraction(outputs, ids.flip(1))}  {fraction(outputs, ids)}")
        for title, pattern in patterns.items():
            with clearhead.edit(model, NAME, head=0, pattern=pattern):
                outputs = model(ids)
            print(f"{title:12} {fraction(outputs, ids.flip(1))}  {fraction(outputs, ids)}")


if __name__ == "__main__":
    main()
