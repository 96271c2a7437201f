"""Train a character-level language model that generates new words, on a dictionary or on your own word list.

clearhead train words
clearhead train words --data.file names.txt    your own list, one word per line
clearhead sample runs/words-0
Time: 3 min 59 s on 2 CPU cores
Test accuracy: 34.50% of the next letters (2.13 nats per letter); samples: textered, selamond
"""

from clearhead.models.config import LanguageConfig
from clearhead.tasks.language import Words
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Words()


def words(data: Words = DATA) -> RunConfig:
    return RunConfig(
        recipe="words",
        model=LanguageConfig(
            width=96, depth=4, num_heads=4, mlp_dim=256, pos_embed="rotary", dropout=0.05, vocab_size=data.vocab_size
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, beta2=0.98, schedule="linear", warmup=100),
        training=TrainingConfig(epochs=4, batch_size=256, ema=0.99, evaluate_every=200),
    )
