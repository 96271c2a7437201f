"""Clearhead: a transformer you can read, train and see through.

Importing it loads nothing else: each public name loads its module, and torch, when it is first used.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead import data as data
    from clearhead import insight as insight
    from clearhead import lab as lab
    from clearhead import models as models
    from clearhead import nn as nn
    from clearhead import tasks as tasks
    from clearhead import training as training
    from clearhead.inference.report import report as report
    from clearhead.inference.run import load as load
    from clearhead.inference.run import open_run as open_run
    from clearhead.insight.doctor.examine import examine as examine
    from clearhead.insight.heads import edit as edit
    from clearhead.insight.heads import head_importance as head_importance
    from clearhead.insight.trace import look as look
    from clearhead.models.generate import Beam as Beam
    from clearhead.models.generate import Greedy as Greedy
    from clearhead.models.generate import Sampling as Sampling
    from clearhead.models.language import LanguageModel as LanguageModel
    from clearhead.models.predictor import SequencePredictor as SequencePredictor
    from clearhead.models.presets import list_presets as list_presets
    from clearhead.models.seq2seq import Seq2Seq as Seq2Seq
    from clearhead.models.shapes import shapes as shapes
    from clearhead.models.vit import VisionTransformer as VisionTransformer
    from clearhead.nn import masks as masks
    from clearhead.nn.attention import MultiHeadAttention as MultiHeadAttention
    from clearhead.nn.attention import attend_fused as attend_fused
    from clearhead.nn.attention import attend_reference as attend_reference
    from clearhead.nn.attention import softargmax as softargmax
    from clearhead.page.describe import shipped_model as shipped_model
    from clearhead.recipes import resume as resume
    from clearhead.recipes import train as train
    from clearhead.training.custom import fit as fit

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.nn.attention": ("softargmax", "attend_reference", "attend_fused", "MultiHeadAttention"),
        "clearhead.models.vit": ("VisionTransformer",),
        "clearhead.models.predictor": ("SequencePredictor",),
        "clearhead.models.seq2seq": ("Seq2Seq",),
        "clearhead.models.language": ("LanguageModel",),
        "clearhead.models.generate": ("Greedy", "Sampling", "Beam"),
        "clearhead.models.presets": ("list_presets",),
        "clearhead.models.shapes": ("shapes",),
        "clearhead.insight.trace": ("look",),
        "clearhead.insight.heads": ("edit", "head_importance"),
        "clearhead.insight.doctor.examine": ("examine",),
        "clearhead.recipes": ("train", "resume"),
        "clearhead.training.custom": ("fit",),
        "clearhead.inference.run": ("open_run", "load"),
        "clearhead.inference.report": ("report",),
        "clearhead.page.describe": ("shipped_model",),
    },
    modules=(
        "clearhead.data",
        "clearhead.insight",
        "clearhead.lab",
        "clearhead.models",
        "clearhead.nn",
        "clearhead.nn.masks",
        "clearhead.tasks",
        "clearhead.training",
    ),
)
