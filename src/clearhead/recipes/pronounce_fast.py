"""Predict the pronunciation of a word from its spelling: `pronounce` with a smaller model and fewer epochs.

clearhead train pronounce-fast
Time: 5 min 8 s on 2 CPU cores
Test accuracy: 60.82% exact match; clearhead evaluate RUN --beam 1: word error rate 34.8%, phonemes 8.7%
"""

from dataclasses import replace

from clearhead.models.config import Seq2SeqConfig
from clearhead.recipes.pronounce import DATA, pronounce
from clearhead.tasks.pronounce import Pronounce
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig


def pronounce_fast(data: Pronounce = DATA) -> RunConfig:
    return replace(
        pronounce(data),
        recipe="pronounce-fast",
        model=Seq2SeqConfig(
            width=96,
            depth=2,
            num_heads=4,
            mlp_dim=256,
            dropout=0.05,
            src_vocab_size=data.src_vocab_size,
            tgt_vocab_size=data.tgt_vocab_size,
        ),
        optimizer=OptimizerConfig(name="muon", lr=3e-3, beta2=0.98, schedule="linear", warmup=100),
        training=TrainingConfig(epochs=4, batch_size=256, ema=0.99),
    )
