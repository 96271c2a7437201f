"""A BERT of Hugging Face, with random weights, on labelled sentences that the example makes itself.

pip install transformers; python examples/bert.py
"""

import random
import sys

import torch
from torch import nn

import clearhead

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError as error:
    sys.exit(f"this example needs transformers: {error}")

SUBJECTS = ["the film", "the book", "this song", "that meal", "her talk", "our trip"]
GOOD, BAD = ["great", "lovely", "brilliant", "fine"], ["awful", "boring", "terrible", "poor"]
VOCAB = ["[PAD]", "[CLS]", *sorted({word for text in (*SUBJECTS, *GOOD, *BAD, "was not") for word in text.split()})]


def sentence(draw: random.Random) -> tuple[str, int]:
    """ "the film was not great", 0: a negation turns the sentiment around."""
    is_good, is_negated = draw.random() < 0.5, draw.random() < 0.5
    adjective = draw.choice(GOOD if is_good else BAD)
    return f"{draw.choice(SUBJECTS)} was {'not ' if is_negated else ''}{adjective}", int(is_good != is_negated)


def encode(text: str, length: int = 8) -> dict[str, torch.Tensor]:
    ids = [VOCAB.index(word) for word in ("[CLS]", *text.split())]
    padding = [0] * (length - len(ids))
    return {
        "input_ids": torch.tensor(ids + padding),
        "attention_mask": torch.tensor([1] * len(ids) + padding),
    }


def examples(n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Dicts with "labels", as Hugging Face's data sets have them; all other entries are arguments of the model."""
    draw = random.Random(seed)
    return [encode(text) | {"labels": torch.tensor(label)} for text, label in (sentence(draw) for _ in range(n))]


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=len(VOCAB), num_labels=2, **sizes))


train, val = examples(800, seed=0), examples(200, seed=1)
clearhead.fit(bert, train, val, epochs=4, lr=3e-3, warmup=20, threads=1, dir="runs/bert", resume=True)

run = clearhead.open_run("runs/bert", model=bert)
text = "the film was not great"
inputs = {name: value[None] for name, value in encode(text).items()}
print(f"\n{text!r}: {'good' if run.model(**inputs).logits.argmax() else 'bad'}\n\n{run.look(inputs)}")
