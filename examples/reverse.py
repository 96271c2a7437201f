"""Train a transformer with one head to reverse 16 digits, then print its attention weights.

python examples/reverse.py
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead import SequencePredictor, look

STEPS, BATCH, LENGTH = 200, 128, 16


def digits(n: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """n random sequences (n,16), and the same reversed."""
    ids = torch.randint(0, 10, (n, LENGTH), generator=random)
    return ids, ids.flip(1)


def train(model: SequencePredictor) -> None:
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        ids, reversed_ids = digits(BATCH, random)
        loss = F.cross_entropy(model(ids).flatten(0, 1), reversed_ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step:4d}   loss {loss.item():.4f}")


@torch.no_grad()
def test(model: SequencePredictor) -> float:
    """The fraction of 10,000 unseen sequences that are reversed without an error."""
    ids, reversed_ids = digits(10_000, torch.Generator().manual_seed(2))
    return (model(ids).argmax(-1) == reversed_ids).all(1).float().mean().item()


def attention_map(model: SequencePredictor, ids: Tensor) -> Tensor:
    """The attention weights (L,L) of the only head, for ids (1,L)."""
    (attention,) = look(model, ids).values()
    return attention.weights()[0, 0]


def main() -> None:
    torch.set_num_threads(1)  # a model this small is slower with two threads
    torch.manual_seed(0)
    model = SequencePredictor.from_preset("reverse")
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"Training {num_parameters:,} parameters to reverse {LENGTH} digits.")
    start = time.perf_counter()
    train(model)
    seconds = time.perf_counter() - start
    print(
        f"{test(model):.2%} of 10,000 unseen sequences reversed without an error, after {seconds:.1f} s of training.\n"
    )

    ids, _ = digits(1, torch.Generator().manual_seed(3))
    weights = attention_map(model, ids)
    print("Attention from each output (row) to each input (column), from 0 to 1 as ' .:-=+*#%@':\n")
    print("            " + " ".join(f"{digit}" for digit in ids[0].tolist()))
    for row, output in zip(weights, model(ids)[0].argmax(-1).tolist(), strict=True):
        print(f"  output {output}  " + " ".join(" .:-=+*#%@"[min(9, int(w * 10))] for w in row.tolist()))
    anti_diagonal = weights.flip(1).diagonal().mean()
    print(f"\n{anti_diagonal:.1%} of the attention is on the mirrored position.")


if __name__ == "__main__":
    main()
