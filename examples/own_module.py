"""Train a module of your own on a pair of tensors, open the run again, and look at its attention.

python examples/own_module.py
"""

import torch
from torch import Tensor, nn

import clearhead

LENGTH, WIDTH = 12, 32


class FindLargest(nn.Module):
    """Numbers (B,L) -> one logit for each position (B,L): which of the numbers is the largest?"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(numbers[..., None])))[..., 0]


def examples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(n, LENGTH, generator=torch.Generator().manual_seed(seed))
    return numbers, numbers.argmax(1)


def main() -> None:
    result = clearhead.fit(
        FindLargest,  # a class, a function without arguments, or a module
        examples(2000, seed=0),
        examples(500, seed=1),
        test_data=examples(500, seed=2),
        epochs=3,
        batch_size=50,
        lr=3e-3,
        threads=1,
        dir="runs/largest",
        resume=True,  # continue if the run exists
    )
    assert result.test is not None
    print(f"\nThe largest number is found in {result.test['accuracy']:.1%} of the test examples.\n")

    run = clearhead.open_run("runs/largest", model=FindLargest)
    numbers, largest = examples(1, seed=3)
    trace = run.look(numbers)
    print(trace)
    weights = trace["encoder.layers.1.self_attn"].weights()[0].mean((0, 1))  # over heads and queries
    print(f"\nAttention to the largest number, at position {int(largest)}: {weights[largest].item():.0%}")


if __name__ == "__main__":
    main()
