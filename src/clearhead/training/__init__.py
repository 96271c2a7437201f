"""Training: the loop, optimizers, checkpoints, distributed processes and the run directory."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

if TYPE_CHECKING:
    from clearhead.training.config import OptimizerConfig as OptimizerConfig
    from clearhead.training.config import RunConfig as RunConfig
    from clearhead.training.config import SnapshotConfig as SnapshotConfig
    from clearhead.training.config import TrainingConfig as TrainingConfig
    from clearhead.training.loop import TrainResult as TrainResult

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.training.config": ("RunConfig", "TrainingConfig", "OptimizerConfig", "SnapshotConfig"),
        "clearhead.training.loop": ("TrainResult",),
    },
)
