"""MNIST (40,000 images) with a vision transformer without position embeddings, layer norms and output projection.

clearhead train mnist-plain
Time: 6 min 20 s on 1 CPU core
Test accuracy: 92.30% after 20 epochs; the best within 353 epochs is 94.61% (50 minutes on 2 CPU cores)

The report that introduced this model gives 94.61% after 1000 epochs. A comparison with `mnist` shows what the missing
parts contribute.
"""

from clearhead.models import presets
from clearhead.tasks.images import Mnist
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Mnist(limit=40_000)


def mnist_plain(data: Mnist = DATA) -> RunConfig:
    return RunConfig(
        recipe="mnist-plain",
        model=presets.vit_mnist_plain(),
        data=data,
        optimizer=OptimizerConfig(lr=1e-3, schedule="constant", weight_decay=0.0),
        training=TrainingConfig(epochs=20, batch_size=128),
    )
