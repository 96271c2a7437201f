"""Training against testing: the same input twice."""

import torch

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor


def run(*, seed: int = 0, width: int = 16, dropout: float = 0.2, testing: bool = True) -> Result:
    """testing=False asks of the training stage what holds in the testing stage only."""
    torch.manual_seed(seed)
    model = SequencePredictor(
        PredictorConfig(width=width, depth=2, n_heads=2, n_inputs=10, n_outputs=10, dropout=dropout)
    )
    ids = torch.randint(0, 10, (4, 8))

    def change(training: bool) -> float:
        model.train(training)
        with torch.no_grad():
            return (model(ids) - model(ids)).abs().max().item()

    return Result(
        (
            at_most("same input twice, testing stage: difference", change(not testing), 0.0),
            at_least("same input twice, training stage: difference", change(True), 1e-3),
        )
    )


CLAIM = Claim(
    slug="stages",
    rows=("R0.8",),
    lesson="Masks, training and testing",
    statement="In the testing stage the same input gives the same output; in the training stage dropout changes it.",
    mistake="A trained model always answers the same.",
    formula="dropout(x) = x m / (1-p), m drawn anew in training; x itself in testing",
    run=run,
    try_next="clearhead lab stages --dropout 0.01",
)
