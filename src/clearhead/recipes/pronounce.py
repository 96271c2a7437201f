"""Predict the pronunciation of a word from its spelling: the encoder-decoder of Vaswani et al. (2017) on CMUdict.

clearhead train pronounce
clearhead train pronounce --data.train-file my.dict --data.test-file my.test
torchrun --nproc-per-node 2 -m clearhead train pronounce --training.threads 1    # fastest on two cores
Time: 100 minutes on 2 CPU cores
Test accuracy: 22% word error rate and 5.4% phoneme error rate on 2,000 held-out words of the dictionary used in papers;
               20.69% and 4.95% on its 12,000 test words with an ensemble of four runs (evaluate --ensemble)
"""

from clearhead.data.datasets import DataConfig
from clearhead.models.config import Seq2SeqConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

LETTERS, PHONES, STRESSED = 32, 42, 72
"""vocabulary sizes of the embedded dictionary, including the special tokens"""


def pronounce(*, train_file: str = "", test_file: str = "", stress: bool = False, window: int = 50) -> RunConfig:
    """The training dictionary determines the vocabularies of letters and phones."""
    src_vocab_size, tgt_vocab_size = vocab_sizes(train_file, stress)
    return RunConfig(
        recipe="pronounce",
        model=Seq2SeqConfig(
            width=128,
            depth=4,
            num_heads=4,
            mlp_dim=512,
            dropout=0.1,
            src_vocab_size=src_vocab_size,
            tgt_vocab_size=tgt_vocab_size,
        ),
        data=DataConfig(
            name="pronounce",
            train_file=train_file,
            test_file=test_file,
            stress=stress,
            window=window,
            validation=2000,
        ),
        optimizer=OptimizerConfig(
            name="muon", lr=3e-3, muon_lr=0.02, beta2=0.98, schedule="linear", warmup=200, weight_decay=0.05
        ),
        training=TrainingConfig(epochs=36, batch_size=512, label_smoothing=0.1, ema=0.998),
        objective="seq2seq",
    )


def vocab_sizes(train_file: str, stress: bool) -> tuple[int, int]:
    """The number of letters and of phones, including the special tokens."""
    if not train_file:
        return LETTERS, STRESSED if stress else PHONES
    from clearhead.data.vocab import SPECIAL_TOKENS, letters_in, phones_in, read_dictionary

    words = read_dictionary(train_file, stress=stress)
    return len(SPECIAL_TOKENS) + len(letters_in(words)), len(SPECIAL_TOKENS) + len(phones_in(words))
