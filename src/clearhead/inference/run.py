"""A trained run: the model of its best checkpoint, and everything that inference needs to use it.

    run = clearhead.open_run("runs/mine")
    run.predict(["photo.jpg"]), run.evaluate("test"), run.sample("Once"), run.look("photo.jpg"), run.metrics

Each method accepts the inputs of the run's own task. Dims: B batch, C channels, L length, V classes.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from clearhead.data import mnist
from clearhead.data.augment import tta_mean
from clearhead.data.datasets import changed_files, digests
from clearhead.data.images import read_image, resize
from clearhead.models.config import VisionConfig, build_model
from clearhead.training.compatibility import config_for_inference
from clearhead.training.distributed import load_tensors
from clearhead.training.objectives import BATCH_SIZE
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory
from clearhead.training.state import DataInfo

if TYPE_CHECKING:
    from clearhead.insight.trace import AttentionTrace
    from clearhead.models.generate import Sampling

InputKind = Literal["images", "digits", "words", "text"]
PartName = Literal["validation", "test"]
INFERENCE_BATCH_SIZE = BATCH_SIZE
"""as in an evaluation, so that both compute the same logits"""
MIN_SET_SIZE = 3
"""of two images, neither is the odd one"""


def open_run(path: str | Path) -> "Run":
    """A run by its path, or by its name in runs/."""
    return Run(path)


def load(run: str | Path) -> nn.Module:
    """The model of a run's best checkpoint, in eval mode. Its inputs and outputs are those of training: for `reverse`,
    ids (B,16) -> logits (B,16,10); for normalized images, (B,C,height,width) -> (B,V); for `words` and `text`, ids
    (B,L) -> (B,L,V); for `pronounce`, letters (B,K) and the phones before each position (B,Q) -> (B,Q,V)."""
    return open_run(run).model


@dataclass(frozen=True)
class Prediction:
    """The predicted class, sequence or number."""

    label: str
    probability: float | None
    """None for a number"""
    probabilities: dict[str, float]
    """of all classes, or of the candidates of a beam search, best first; {} for a number"""


class Run:
    """The best checkpoint of a run: `model`, `config`, `step`, `path`, class names and preprocessing."""

    def __init__(self, path: str | Path):
        directory = RunDirectory.open(path)
        self.path = directory.path
        best = directory.best_checkpoint()
        if best is None:
            raise LookupError(f"{path} has no checkpoint yet; continue training with: clearhead resume {path}")
        self.step = best.step
        self.config = config_for_inference(directory, best)
        with torch.random.fork_rng(devices=[]):
            self.model = build_model(self.config.model)
        load_tensors(self.model.state_dict(), eval_weights(best.model, best.optimizer))
        self.model.eval()
        data = DataInfo.from_state(best.state)
        data.check_matches(self.config)
        self.classes, self.vocab, self.data_files = data.classes, data.vocab, data.files
        self.normalize = data.normalize

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, recipe={self.config.recipe!r}, step={self.step})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl in their order: {"kind": "train", "step": 50, "loss": ...}, ..."""
        return RunDirectory.open(self.path).records()

    @property
    def input_kind(self) -> InputKind:
        """What the model takes: decides what `predict` and `look` accept."""
        if self.normalize is not None or self.takes_sets:
            return "images"
        kinds: dict[str, InputKind] = {"seq2seq": "words", "causal-lm": "text"}
        return kinds.get(self.config.objective, "digits")

    @property
    def takes_sets(self) -> bool:
        """Whether several images are one input, as for `odd-one-out`."""
        return self.config.objective == "set-pointer"

    @property
    def hint(self) -> str:
        """The next step after an input of another kind."""
        return {
            "images": "pass image files",
            "digits": "pass one sequence of digits: --ids 3 1 4, or run.predict([3, 1, 4])",
            "words": "pass words",
            "text": f"generate text with: clearhead sample {self.path}",
        }[self.input_kind]

    def predict(
        self, inputs: Tensor | str | Path | Sequence[str | Path] | Sequence[int], *, invert: bool = False
    ) -> list[Prediction]:
        """Images, as files or uint8 (B,C,height,width): a prediction for each; `invert` swaps dark and light, because
        MNIST's digits are white on black. Digits (L,): a prediction for each digit or for the sequence, with
        a warning if L differs from that of training. Words: the pronunciation of each."""
        inputs = [inputs] if isinstance(inputs, str | Path) else inputs
        self.check_kind(inputs)
        if self.input_kind == "digits":
            predictions = self.predict_digits(inputs)  # type: ignore[arg-type]
            if warning := self.length_warning(inputs):  # type: ignore[arg-type]
                warnings.warn(warning, stacklevel=2)
            return predictions
        if self.input_kind == "words":
            from clearhead.inference.generation import predict_words

            return predict_words(self, [str(word) for word in inputs])
        pixels = inputs if isinstance(inputs, Tensor) else self.read_images(inputs)  # type: ignore[arg-type]
        pixels = 255 - pixels if invert else pixels
        if self.takes_sets:
            return self.predict_set(mnist.NORMALIZE(pixels))
        assert self.normalize is not None
        return self.to_predictions(self.logits(self.normalize(pixels)))

    def evaluate(self, part: PartName = "test") -> dict[str, Any]:
        """Metrics on a part of the run's data, as `clearhead evaluate` prints them: loss and accuracy, or word and
        phoneme error rates."""
        from clearhead.inference.evaluate import evaluate_run

        return evaluate_run(self, part)

    def sample(
        self, prompt: str = "", *, n: int = 1, max_new_tokens: int = 300, strategy: "Sampling | None" = None
    ) -> list[str]:
        """n continuations of a prompt, each with the prompt before it, by a language model (`words`, `text`)."""
        from clearhead.inference.generation import draw_samples
        from clearhead.models.generate import Sampling

        return draw_samples(self, prompt, strategy or Sampling(), n=n, max_new_tokens=max_new_tokens)

    def look(
        self, example: Tensor | str | Path | Sequence[str | Path] | Sequence[int], *, invert: bool = False
    ) -> "AttentionTrace":
        """The attention of every layer for one input: an image file or uint8 (C,height,width), a set of images,
        digits, a word to be pronounced, or text."""
        from clearhead.inference.explain import make_example, trace

        return trace(self, make_example(self, example, invert=invert))

    def check_kind(self, inputs: Tensor | Sequence[object]) -> None:
        """Refuses inputs of another kind than the run's. Strings may be paths or words."""
        if not len(inputs):
            raise ValueError("predict needs at least one input, got none")
        kind = (
            "text"
            if isinstance(inputs[0], str | Path)
            else "images"
            if isinstance(inputs, Tensor) and inputs.dim() > 1
            else "digits"
        )
        accepted = {"images": ("images", "text"), "digits": ("digits",), "words": ("text",), "text": ()}
        if kind not in accepted[self.input_kind]:
            given = repr(str(inputs[0])) if kind == "text" else kind
            raise ValueError(f"{self.path} takes {self.input_kind}, got {given}; {self.hint}")

    def check_data_files(self) -> None:
        """In a changed file, words of the test part may be among those of training, and ids may have other meanings."""
        if changed := changed_files(self.data_files, digests(self.config.data)):
            raise ValueError(
                f"the data of {self.path} has changed since training: {', '.join(changed)}; restore the original files"
            )

    def predict_digits(self, ids: Tensor | Sequence[int]) -> list[Prediction]:
        """`predict` for one sequence of digits, without the warning about its length."""
        self.check_kind(ids)
        if not all(isinstance(n, int) for n in (ids.tolist() if isinstance(ids, Tensor) else ids)):
            raise ValueError(
                "digits are one sequence of integers, such as [3, 1, 4]; call predict once for each sequence"
            )
        invalid = [] if isinstance(ids, Tensor) else [n for n in ids if not 0 <= n <= 9]
        if invalid:
            raise ValueError(f"ids must be from 0 to 9, got {invalid[0]}")
        logits = self.logits(torch.as_tensor(ids, dtype=torch.long)[None])
        return self.to_predictions(logits[0] if self.config.objective == "token-classification" else logits)

    def predict_set(self, images: Tensor) -> list[Prediction]:
        """Normalized images (S,1,28,28) of one set: "odd" for the most probable, the first of equals, else "-"."""
        if len(images) < MIN_SET_SIZE:
            raise ValueError(f"a set needs at least {MIN_SET_SIZE} images, got {len(images)}")
        probabilities = self.logits(images.flatten(1)[None]).flatten().softmax(0).tolist()
        odd = probabilities.index(max(probabilities))
        return [Prediction("odd" if i == odd else "-", p, {"odd": p, "-": 1 - p}) for i, p in enumerate(probabilities)]

    def length_warning(self, ids: Tensor | Sequence[int]) -> str:
        """A warning if the number of digits differs from that in training, else ""."""
        length = self.config.data.length
        if len(ids) == length:
            return ""
        return f"{self.path} was trained on sequences of {length} digits, got {len(ids)}; its prediction is unreliable"

    @torch.inference_mode()
    def logits(self, inputs: Tensor) -> Tensor:
        """The model's outputs for its own kind of inputs; for images the mean over the views of `training.tta`."""
        tta = self.config.training.tta
        return torch.cat([tta_mean(self.model, part, tta) for part in inputs.split(INFERENCE_BATCH_SIZE)])

    def read_images(self, paths: Sequence[str | Path]) -> Tensor:
        """Image files -> uint8 (B,C,height,width), squared and resized as in training (`data.fit`)."""
        model, fit = self.config.model, self.config.data.fit
        channels, size = (model.in_channels, model.image_shape[0]) if isinstance(model, VisionConfig) else (1, 28)
        images = (in_channels(read_image(Path(path)), channels) for path in paths)
        return torch.stack([resize(image, size, fit)[:channels] for image in images])

    def to_predictions(self, logits: Tensor) -> list[Prediction]:
        """logits (B,V); for binary classification and regression (B,1)"""
        objective = self.config.objective
        if objective in ("regression", "binary-classification") and (logits.dim() != 2 or logits.shape[-1] != 1):
            raise ValueError(
                f"objective={objective} needs a model with one output, got outputs of shape {tuple(logits.shape)} "
                f"from {self.path}"
            )
        if objective == "regression":
            return [Prediction(f"{value:.2f}", None, {}) for value in logits.squeeze(-1).tolist()]
        if objective == "binary-classification":
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)  # softmax([0, z]) is sigmoid(z)
        return [self.to_prediction(row) for row in logits.softmax(-1).tolist()]

    def to_prediction(self, probabilities: Sequence[float]) -> Prediction:
        pairs = sorted(zip(self.classes, probabilities, strict=True), key=lambda pair: -pair[1])
        return Prediction(pairs[0][0], pairs[0][1], dict(pairs))


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """Converted to grayscale for a model with one channel."""
    return image.convert("L") if channels == 1 else image
