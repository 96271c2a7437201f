"""Predict the pronunciation of a word from its spelling: the encoder-decoder of Vaswani et al. (2017) on CMUdict.

clearhead train pronounce
clearhead train pronounce --data.train-file my.dict --data.test-file my.test
torchrun --nproc-per-node 2 -m clearhead train pronounce --training.threads 1    # fastest on two cores
Time: 100 minutes on 2 CPU cores
Test accuracy: 22% word error rate and 5.4% phoneme error rate on 2,000 held-out words of the dictionary used in papers;
               20.69% and 4.95% on its 12,000 test words with an ensemble of four runs (evaluate --ensemble)
"""

from clearhead.models.config import Seq2SeqConfig
from clearhead.tasks.pronounce import Pronounce
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Pronounce(validation=2000)


def pronounce(data: Pronounce = DATA) -> RunConfig:
    return RunConfig(
        recipe="pronounce",
        model=Seq2SeqConfig(
            width=128,
            depth=4,
            num_heads=4,
            mlp_dim=512,
            dropout=0.1,
            src_vocab_size=data.src_vocab_size,
            tgt_vocab_size=data.tgt_vocab_size,
        ),
        data=data,
        optimizer=OptimizerConfig(
            name="muon", lr=3e-3, muon_lr=0.02, beta2=0.98, schedule="linear", warmup=200, weight_decay=0.05
        ),
        training=TrainingConfig(epochs=36, batch_size=512, label_smoothing=0.1, ema=0.998),
    )
