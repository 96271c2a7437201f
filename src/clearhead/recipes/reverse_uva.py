"""Reverse 16 random digits with the numbers of the University of Amsterdam's deep learning tutorial 6 (the "notebook").

clearhead train reverse-uva
takes      28 seconds on one processor core (processor time; the machine was busy with other work)
reaches    100.00% of 10,000 unseen sequences without a mistake; of the validation sequences after 3 of 10 epochs

The same as in the notebook: the network (width 32, one post-norm block, one head, feed-forward width 64 with ReLU,
sinusoidal positions, output net of Linear, LayerNorm, ReLU, Dropout and Linear, no dropout), 50,000 sequences for
training, 1,000 for validation and 10,000 for the test, Adam (AdamW without weight decay) with a learning rate of 5e-4,
batches of 128, 10 epochs of 390 steps, gradient clipping at norm 5.
Different from the notebook:
- Every linear layer starts with Xavier weights and zero biases. The notebook does this in attention only, where it
  counts query, key and value as one layer of 96 outputs; its other layers start as PyTorch's do.
- The cosine starts after the 50 warm-up steps instead of being multiplied by the warm-up, and the first step has 1/50
  of the learning rate instead of 0. The two learning rates differ by at most 2.1% of the peak.
- The sequences are drawn by another random number generator.
`clearhead train reverse` is the same task with a recipe that needs a twentieth of the steps.
"""

from dataclasses import replace

from clearhead.data.config import DataConfig
from clearhead.models import presets
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig


def reverse_uva(*, length: int = 16) -> RunConfig:
    return RunConfig(
        recipe="reverse-uva",
        model=replace(presets.reverse_uva(), context_length=length),
        data=DataConfig(name="reverse", length=length),
        optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.0, schedule="cosine", warmup=50, grad_clip=5.0),
        training=TrainingConfig(epochs=10, batch_size=128, precision="float32", threads=1),
        objective="token-classification",
    )
