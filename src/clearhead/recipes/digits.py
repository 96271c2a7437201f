"""Predict one property of 16 random digits: the most common digit, their sum, or (of 8) whether a digit repeats.

clearhead train digits                          classification: cross-entropy
clearhead train digits --data.question repeat   binary classification: binary cross-entropy
clearhead train digits --data.question sum      regression: mean squared error
Time: 44 s on 1 CPU core (most-common); 90 s (sum)
Test accuracy: 100.00% (most-common), 100.00% (repeat), 99.80% (sum, rounded) on 10,000 sequences
"""

from dataclasses import dataclass

from clearhead.data.datasets import DataConfig, Question
from clearhead.models.config import PredictorConfig, PredictorPoolingName
from clearhead.training.config import ObjectiveName, OptimizerConfig, RunConfig, TrainingConfig


@dataclass(frozen=True)
class DigitsTask:
    """The objective and output layer of a question."""

    objective: ObjectiveName
    out_features: int
    pooling: PredictorPoolingName


QUESTIONS: dict[str, DigitsTask] = {
    "most-common": DigitsTask("classification", out_features=10, pooling="mean"),
    "repeat": DigitsTask("binary-classification", out_features=1, pooling="mean"),
    "sum": DigitsTask("regression", out_features=1, pooling="mean"),
}


def digits(*, question: Question = "most-common", length: int | None = None) -> RunConfig:
    if length is None:
        length = 8 if question == "repeat" else 16  # among 16 digits, one always repeats
    data = DataConfig(name="digits", question=question, length=length)
    task = QUESTIONS[question]
    return RunConfig(
        recipe="digits",
        model=PredictorConfig(
            width=64,
            depth=1,
            num_heads=4,
            in_features=10,
            out_features=task.out_features,
            context_length=length,
            pos_embed="none",  # no answer depends on the order of the digits
            pooling=task.pooling,
            head_mlp_dim=64,
        ),
        data=data,
        optimizer=OptimizerConfig(lr=3e-3, beta2=0.98, schedule="linear", warmup=150),
        training=TrainingConfig(steps=1500, batch_size=128, evaluate_every=300, threads=1),
        objective=task.objective,
    )
