"""Train a character- or byte-level language model on your own text: four decoder blocks, context length 64.

clearhead train text --data.file PATH
clearhead sample runs/text-0 --prompt "Once upon a time"
Time: 6 minutes on 2 CPU cores
Test accuracy: 54.2% of the next characters (1.54 nats per character) on a held-out part of Tiny Shakespeare
"""

from clearhead.models.config import LanguageConfig
from clearhead.tasks.language import Text
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Text(validation=2000)


def text(data: Text = DATA) -> RunConfig:
    return RunConfig(
        recipe="text",
        model=LanguageConfig(
            width=128,
            depth=4,
            num_heads=4,
            pos_embed="rotary",
            vocab_size=data.vocab_size,
            context_length=data.context_length,
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, beta2=0.98, schedule="linear", warmup=50),
        training=TrainingConfig(steps=2000, batch_size=32, evaluate_every=200),
    )
