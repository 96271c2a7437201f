"""Find the image of a different class among ten MNIST images: one score per image, softmax over the set.

clearhead train odd-one-out
Time: 5 min 32 s on 1 CPU core
Test accuracy: 99.17% on 10,000 sets
"""

from clearhead.data.datasets import DataConfig
from clearhead.models.config import PredictorConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig


def odd_one_out(*, set_size: int = 10) -> RunConfig:
    return RunConfig(
        recipe="odd-one-out",
        model=PredictorConfig(
            width=128,
            depth=2,
            num_heads=4,
            in_features=28 * 28,
            out_features=1,
            context_length=set_size,
            pos_embed="none",  # a set has no order: the prediction is permutation-equivariant
            head_mlp_dim=128,
        ),
        data=DataConfig(name="odd-one-out", set_size=set_size),
        optimizer=OptimizerConfig(name="muon", lr=1e-3, schedule="linear", warmup=50),
        training=TrainingConfig(epochs=5, batch_size=128),
        objective="set-pointer",
    )
