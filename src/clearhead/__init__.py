"""Clearhead: a transformer you can read, train and see through.

Importing it loads nothing: each name below loads its module, and torch, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead import lab as lab
    from clearhead.inference.run import load as load
    from clearhead.insight.doctor.examine import examine as examine
    from clearhead.insight.edit import edit as edit
    from clearhead.insight.edit import head_importance as head_importance
    from clearhead.insight.look import look as look
    from clearhead.models.language import LanguageModel as LanguageModel
    from clearhead.models.predictor import SequencePredictor as SequencePredictor
    from clearhead.models.seq2seq import Seq2Seq as Seq2Seq
    from clearhead.models.shapes import shapes as shapes
    from clearhead.models.vit import VisionTransformer as VisionTransformer
    from clearhead.nn import masks as masks
    from clearhead.nn.attention import MultiHeadAttention as MultiHeadAttention
    from clearhead.nn.attention import attend_fused as attend_fused
    from clearhead.nn.attention import attend_reference as attend_reference
    from clearhead.nn.attention import softargmax as softargmax
    from clearhead.recipes.launch import train as train

_HOMES = {
    "softargmax": "clearhead.nn.attention",
    "attend_reference": "clearhead.nn.attention",
    "attend_fused": "clearhead.nn.attention",
    "MultiHeadAttention": "clearhead.nn.attention",
    "masks": "clearhead.nn.masks",
    "SequencePredictor": "clearhead.models.predictor",
    "VisionTransformer": "clearhead.models.vit",
    "Seq2Seq": "clearhead.models.seq2seq",
    "LanguageModel": "clearhead.models.language",
    "shapes": "clearhead.models.shapes",
    "look": "clearhead.insight.look",
    "edit": "clearhead.insight.edit",
    "head_importance": "clearhead.insight.edit",
    "examine": "clearhead.insight.doctor.examine",
    "lab": "clearhead.lab",
    "train": "clearhead.recipes.launch",
    "load": "clearhead.inference.run",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"clearhead has no {name!r}; it has {', '.join(_HOMES)}")
    home = import_module(_HOMES[name])
    return home if name in ("masks", "lab") else getattr(home, name)


def __dir__() -> list[str]:
    """The public names and the module's own dunders; neither imports nor submodules that happen to be loaded."""
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
