"""A trained run, ready to be asked. Dims: B batch, C channels, L length, V classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from clearhead.data import mnist
from clearhead.data.augment import tta_mean
from clearhead.data.datasets import changed_files, digests
from clearhead.data.images import read_image, resize
from clearhead.models.config import VisionConfig
from clearhead.models.factory import build_model
from clearhead.training.compatibility import config_for_inference
from clearhead.training.distributed import load_tensors
from clearhead.training.objectives import BATCH_SIZE
from clearhead.training.optim import weights_to_use
from clearhead.training.run_directory import RunDirectory
from clearhead.training.state import DataInfo

InputKind = Literal["images", "digits", "words", "text"]
AT_ONCE = BATCH_SIZE
"""examples that are answered in one pass: as many as in an evaluation, so that both give the same logits"""
FEWEST_OF_A_SET = 3
"""of two, neither is the odd one"""


def load(run: str | Path) -> nn.Module:
    """The trained model of a run: its best checkpoint, in the testing stage. It answers as it did in training: for
    `reverse`, ids (B,16) -> logits (B,16,10); for images, which must be normalised, (B,C,height,width) -> (B,V); for
    `words` and `text`, ids (B,L) -> (B,L,V); for `pronounce`, letters (B,K) and phones so far (B,Q) -> (B,Q,V)."""
    return Run(run).model


@dataclass(frozen=True)
class Prediction:
    """A class and how sure the model is of it; or a number, about which it says nothing of the kind."""

    label: str
    probability: float | None
    probabilities: dict[str, float]
    """of all classes, the most likely first; {} where the answer is a number"""


class Run:
    """A run's best checkpoint, with the names of its classes and all that happens to a picture before the model."""

    def __init__(self, run: str | Path):
        directory = RunDirectory.open(run)
        self.path = directory.path
        found = directory.best_checkpoint()
        if found is None:
            raise LookupError(f"{run} must have a checkpoint, got none yet; train it longer: clearhead resume {run}")
        self.step = found.step
        self.config = config_for_inference(directory, found)
        with torch.random.fork_rng(devices=[]):
            self.model = build_model(self.config.model)
        load_tensors(self.model.state_dict(), weights_to_use(found.model, found.optimizer))
        self.model.eval()
        about = DataInfo.from_state(found.state)
        about.check_matches(self.config)
        self.classes, self.vocab, self.files = about.classes, about.vocab, about.files
        self.normalize = about.normalize

    @property
    def input_kind(self) -> InputKind:
        """What the model predicts from."""
        if self.normalize is not None or self.config.data.name == "odd-one-out":
            return "images"
        kinds: dict[str, InputKind] = {"seq2seq": "words", "causal-lm": "text"}
        return kinds.get(self.config.objective, "digits")

    @property
    def hint(self) -> str:
        """The next step for somebody who passed another kind of input."""
        return {
            "images": "pass image files",
            "digits": "pass digits: --ids 3 1 4",
            "words": "pass words",
            "text": f"generate text with: clearhead sample {self.path}",
        }[self.input_kind]

    def check_files(self) -> None:
        """In a file that has changed, words that validate or test may be such as were learnt, and ids may stand for
        other symbols."""
        if changed := changed_files(self.files, digests(self.config.data)):
            raise ValueError(
                f"{self.path} is measured on the data of its training, got other bytes in {', '.join(changed)}; "
                "put the old ones back"
            )

    def predict(self, images: Tensor | Sequence[str | Path], *, invert: bool = False) -> list[Prediction]:
        """An answer for each picture: files, or uint8 (B,C,height,width). `invert` makes dark light: MNIST's digits
        are white on black. Of `odd-one-out`, the pictures are one set; each answer says how likely it is odd."""
        if self.input_kind != "images":
            raise ValueError(f"{self.path} takes {self.input_kind}, got images; {self.hint}")
        pixels = images if isinstance(images, Tensor) else self.read(images)
        pixels = 255 - pixels if invert else pixels
        if self.config.data.name == "odd-one-out":
            return self.odd_one(mnist.NORMALIZE(pixels))
        assert self.normalize is not None
        return self.read_answers(self.logits(self.normalize(pixels)))

    def predict_ids(self, ids: Tensor | Sequence[int]) -> list[Prediction]:
        """Digits (L,): an answer for each of them (`reverse`), or one for the whole."""
        if self.input_kind != "digits":
            raise ValueError(f"{self.path} takes {self.input_kind}, got digits; {self.hint}")
        wrong = [] if isinstance(ids, Tensor) else [n for n in ids if not 0 <= n <= 9]
        if wrong:
            raise ValueError(f"ids must be from 0 to 9, got {wrong[0]}; ask about digits")
        logits = self.logits(torch.as_tensor(ids, dtype=torch.long)[None])
        return self.read_answers(logits[0] if self.config.objective == "token-classification" else logits)

    def length_warning(self, ids: Sequence[int]) -> str:
        """What to say of digits that are more or fewer than those in training; "" where they are as many."""
        length = self.config.data.length
        if len(ids) == length:
            return ""
        return f"{self.path} has learnt from sequences of {length} digits, got {len(ids)}: its answer is a guess"

    @torch.inference_mode()
    def logits(self, inputs: Tensor) -> Tensor:
        """What the model answers to its own kind of inputs; for images the mean over as many views as the run was
        tested with."""
        tta = self.config.training.tta
        return torch.cat([tta_mean(self.model, part, tta) for part in inputs.split(AT_ONCE)])

    def read(self, paths: Sequence[str | Path]) -> Tensor:
        """Picture files -> uint8 (B,C,height,width), made square as in training (`data.fit`)."""
        model, fit = self.config.model, self.config.data.fit
        channels, size = (model.in_channels, model.image_shape[0]) if isinstance(model, VisionConfig) else (1, 28)
        pictures = (in_channels(read_image(Path(path)), channels) for path in paths)
        return torch.stack([resize(picture, size, fit)[:channels] for picture in pictures])

    def read_answers(self, logits: Tensor) -> list[Prediction]:
        """logits (B,V), (B,1) for yes or no, (B,1) for a number"""
        if self.config.objective in ("regression", "binary-classification") and (
            logits.dim() != 2 or logits.shape[-1] != 1
        ):
            raise ValueError(
                f"objective={self.config.objective} needs a model with one output, got outputs of shape "
                f"{tuple(logits.shape)} from {self.path}"
            )
        if self.config.objective == "regression":
            return [Prediction(f"{number:.2f}", None, {}) for number in logits.squeeze(-1).tolist()]
        if self.config.objective == "binary-classification":
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)  # softmax([0, z]) is sigmoid(z)
        return [self.named(row) for row in logits.softmax(-1).tolist()]

    def named(self, probabilities: list[float]) -> Prediction:
        pairs = sorted(zip(self.classes, probabilities, strict=True), key=lambda pair: -pair[1])
        return Prediction(pairs[0][0], pairs[0][1], dict(pairs))

    def odd_one(self, images: Tensor) -> list[Prediction]:
        if len(images) < FEWEST_OF_A_SET:
            raise ValueError(f"a set has {FEWEST_OF_A_SET} pictures or more, got {len(images)}; name the others too")
        shares = self.logits(images.flatten(1)[None]).flatten().softmax(0).tolist()
        odd = shares.index(max(shares))  # of equal ones the first
        return [
            Prediction("odd" if i == odd else "-", share, {"odd": share, "-": 1 - share})
            for i, share in enumerate(shares)
        ]


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """Grey for a model with one channel."""
    return image.convert("L") if channels == 1 else image
