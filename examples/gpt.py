"""A GPT in 20 lines, written by hand, on a text: train it, check its causal mask, and let it continue a line.

python examples/gpt.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead

TEXT = "the cat sat on the mat. the dog sat on the log. the cat saw the dog. the dog saw the cat. " * 40
VOCAB = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, DEPTH = 32, 48, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(VOCAB), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, len(VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))))


def main() -> None:
    ids = torch.tensor([VOCAB.index(character) for character in TEXT])
    windows = ids.unfold(0, CONTEXT + 1, 7)  # (N,L+1): the target of each character is the next one
    print(clearhead.examine(GPT()).summary())
    data, held_out = (windows[:-50, :-1], windows[:-50, 1:]), (windows[-50:, :-1], windows[-50:, 1:])
    clearhead.fit(GPT, data, held_out, steps=120, optimizer="muon", ema=0.9, threads=1, dir="runs/gpt", resume=True)
    model = clearhead.open_run("runs/gpt", model=GPT).model
    line = "the cat "
    for _ in range(24):
        context = torch.tensor([[VOCAB.index(character) for character in line[-CONTEXT:]]])
        line += VOCAB[int(model(context)[0, -1].argmax())]
    print(line)


if __name__ == "__main__":
    main()
