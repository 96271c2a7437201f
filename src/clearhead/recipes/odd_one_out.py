"""Find the image of a different class among ten MNIST images: one score per image, softmax over the set.

clearhead train odd-one-out
Time: 5 min 32 s on 1 CPU core
Test accuracy: 99.17% on 10,000 sets
"""

from clearhead.models.config import PredictorConfig
from clearhead.tasks.sequences import OddOneOut
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = OddOneOut()


def odd_one_out(data: OddOneOut = DATA) -> RunConfig:
    return RunConfig(
        recipe="odd-one-out",
        model=PredictorConfig(
            width=128,
            depth=2,
            num_heads=4,
            in_features=data.in_features,
            out_features=data.out_features,
            context_length=data.context_length,
            pos_embed="none",  # a set has no order, and the answer moves with the odd one
            head_mlp_dim=128,
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=1e-3, schedule="linear", warmup=50),
        training=TrainingConfig(epochs=5, batch_size=128),
    )
