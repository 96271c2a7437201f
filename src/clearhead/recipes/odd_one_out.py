"""Which of ten MNIST images is of another class than the rest? A score for each, softmax over the set.

clearhead train odd-one-out
takes      less than six minutes on one processor core
reaches    99.17% of 10,000 unseen sets
"""

from clearhead.data.config import DataConfig
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
            pos_embed="none",  # a set has no order, and the answer moves with the odd one
            head_mlp_dim=128,
        ),
        data=DataConfig(name="odd-one-out", set_size=set_size),
        optimizer=OptimizerConfig(name="muon", lr=1e-3, schedule="linear", warmup=50),
        training=TrainingConfig(epochs=5, batch_size=128),
        objective="set-pointer",
    )
