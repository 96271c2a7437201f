"""Train a character-level language model that generates new words, on a dictionary or on your own word list.

clearhead train words
clearhead train words --data.file names.txt    your own list, one word per line
clearhead sample runs/words-0
Time: 3 min 59 s on 2 CPU cores
Test accuracy: 34.50% of the next letters (2.13 nats per letter); samples: textered, selamond
"""

from clearhead.data.datasets import DataConfig
from clearhead.models.config import LanguageConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

VOCAB_SIZE = 29
"""a to z and the three special tokens"""


def words(*, file: str = "", window: int = 50) -> RunConfig:
    """The vocabulary is the set of letters in the word list."""
    return RunConfig(
        recipe="words",
        model=LanguageConfig(
            width=96, depth=4, num_heads=4, mlp_dim=256, pos_embed="rotary", dropout=0.05, vocab_size=count_tokens(file)
        ),
        data=DataConfig(name="words", file=file, window=window),
        optimizer=OptimizerConfig(name="muon", lr=3e-3, beta2=0.98, schedule="linear", warmup=100),
        training=TrainingConfig(epochs=4, batch_size=256, ema=0.99, evaluate_every=200),
        objective="causal-lm",
    )


def count_tokens(file: str) -> int:
    if not file:
        return VOCAB_SIZE
    from clearhead.data.vocab import SPECIAL_TOKENS, letters_in, read_words

    return len(SPECIAL_TOKENS) + len(letters_in(read_words(file)))
