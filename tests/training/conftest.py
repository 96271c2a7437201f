"""Configs of runs of 12 steps on random images or random words, with all sources of randomness; a new run directory."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from clearhead.data import Augmentation
from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Images, Normalize, SequencePairs
from clearhead.data.sequences import Words as WordExamples
from clearhead.data.vocab import BOS, EOS
from clearhead.models.config import LanguageConfig, Seq2SeqConfig, VisionConfig
from clearhead.tasks.images import Mnist
from clearhead.tasks.language import Words
from clearhead.tasks.pronounce import Pronounce
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig
from clearhead.training.run_directory import RunDirectory
from support.runs import RUN_CONFIG

MODEL = VisionConfig(
    image_size=8, patch_size=4, in_channels=1, num_classes=3, width=8, depth=2, num_heads=2, patch_embed="conv"
)
CONFIG = RunConfig(
    recipe="test",
    model=replace(MODEL, dropout=0.2, attention_dropout=0.1, drop_path=0.1),
    data=Mnist(augmentation=Augmentation(crop=1, flip=True, cutout=2, mixup=0.4)),
    optimizer=OptimizerConfig(name="muon", lr=0.01, warmup=3),
    training=TrainingConfig(
        steps=12,
        batch_size=10,
        ema=0.8,
        log_every=5,
        evaluate_every=4,
        checkpoint_every=3,
        keep_checkpoints=20,
        grad_accum_steps=2,
        precision="float32",
    ),
)


def random_images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    images = torch.randint(0, 100, (n, 1, 8, 8), generator=generator)
    return Images((images + 60 * labels[:, None, None, None]).to(torch.uint8), labels)


@pytest.fixture
def config(monkeypatch):
    data = Dataset(
        random_images(57, 0), random_images(13, 1), random_images(17, 2), ("a", "b", "c"), Normalize((0.5,), (0.2,))
    )
    monkeypatch.setattr(Mnist, "read", lambda task, seed: data)
    return CONFIG


SEQ2SEQ = replace(
    CONFIG,
    model=Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=9, tgt_vocab_size=8, dropout=0.2),
    data=Pronounce(window=2),
    training=replace(CONFIG.training, label_smoothing=0.1),
)
CAUSAL_LM = replace(
    SEQ2SEQ,
    model=LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=9, dropout=0.2),
    data=Words(window=2),
)


def random_words(n, seed):
    """Words of 1 to 6 letters; the target has one phone for every second letter."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (n,), generator=generator).tolist()
    words = [torch.randint(3, 8, (size,), generator=generator).tolist() for size in sizes]
    return words, [[*word[::2], EOS] for word in words]


def pairs(n, seed):
    return SequencePairs.of(*random_words(n, seed))


def word_sequences(n, seed):
    words, _ = random_words(n, seed)
    return WordExamples(SequencePairs.of([[BOS, *word] for word in words], [[*word, EOS] for word in words]))


@pytest.fixture(params=["seq2seq", "causal-lm"])
def sequences(request, monkeypatch):
    """The config of a sequence model: an encoder-decoder or a language model."""
    make, config = (pairs, SEQ2SEQ) if request.param == "seq2seq" else (word_sequences, CAUSAL_LM)
    data = Dataset(make(57, 0), make(13, 1), make(17, 2), (), None)
    monkeypatch.setattr(type(config.data), "read", lambda task, seed: data)
    return config


@pytest.fixture
def reports():
    """The messages of `run`."""
    return []


@pytest.fixture
def run(tmp_path, reports):
    """A new run directory."""
    return RunDirectory.create(tmp_path / "runs/mine", RUN_CONFIG, reports.append)


@pytest.fixture
def signal_at(monkeypatch):
    """Sends this process a signal during a given step."""

    def send_at(step, number=signal.SIGTERM):
        def at(self, now, rank=0, world=1):
            if now == step - 1:
                os.kill(os.getpid(), number)
            return whole(self, now, rank, world)

        whole = Batches.at
        monkeypatch.setattr(Batches, "at", at)
        return lambda: monkeypatch.setattr(Batches, "at", whole)

    return send_at
