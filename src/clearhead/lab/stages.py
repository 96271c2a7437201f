"""Training against testing: the same input twice."""

import torch
from torch import Tensor, nn

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

    def moved(training: bool) -> float:
        return weight_change(model, ids, training)

    return Result(
        (
            at_most("same input twice, testing stage: difference", change(not testing), 0.0),
            at_least("same input twice, training stage: difference", change(True), 1e-3),
            at_most("one pass in the testing stage: the weights move by", moved(not testing), 0.0),
            at_least("one pass and its step in the training stage: they move by", moved(True), 1e-6),
        )
    )


def weight_change(model: nn.Module, ids: Tensor, training: bool) -> float:
    """How far the weights move: in training by one step of SGD; in evaluation there is no gradient to step along."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.train(training)
    with torch.set_grad_enabled(training):
        output = model(ids)
    if output.requires_grad:
        output.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return max((new - old).abs().max().item() for new, old in zip(model.parameters(), before, strict=True))


CLAIM = Claim(
    slug="stages",
    rows=("R0.8",),
    lesson="Masks, training and testing",
    statement="In testing the same input gives the same output and weights stay; in training neither is so.",
    mistake="A trained model always answers the same.",
    formula="dropout(x) = x m / (1-p), m drawn anew in training; x itself in testing",
    run=run,
    try_next="clearhead lab stages --dropout 0.01",
    least={"dropout": 0},
    most={"dropout": 0.9},
    multiples={"width": 2},
    kind="demonstration",
)
