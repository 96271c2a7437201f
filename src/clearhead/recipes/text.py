"""Train a character- or byte-level language model on your own text: four decoder blocks, context length 64.

clearhead train text --data.file PATH
clearhead sample runs/text-0 --prompt "Once upon a time"
Time: 6 minutes on 2 CPU cores
Test accuracy: 54.2% of the next characters (1.54 nats per character) on a held-out part of Tiny Shakespeare
"""

from clearhead.data.datasets import DataConfig, Level
from clearhead.models.config import LanguageConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig


def text(*, file: str = "", level: Level = "character", length: int = 64) -> RunConfig:
    """The vocabulary is the set of characters in the file, or all 256 bytes."""
    return RunConfig(
        recipe="text",
        model=LanguageConfig(
            width=128,
            depth=4,
            num_heads=4,
            pos_embed="rotary",
            vocab_size=count_tokens(file, level),
            context_length=length,
        ),
        data=DataConfig(name="text", file=file, level=level, length=length, validation=2000),
        optimizer=OptimizerConfig(name="muon", lr=3e-3, beta2=0.98, schedule="linear", warmup=50),
        training=TrainingConfig(steps=2000, batch_size=32, evaluate_every=200),
        objective="causal-lm",
    )


def count_tokens(file: str, level: Level) -> int:
    """The vocabulary size; without a file, that of printable ASCII and the newline."""
    if not file:
        return 256 if level == "byte" else 96
    from clearhead.data.vocab import read_text, text_vocab

    return len(text_vocab(read_text(file, level), level))
