"""Architectures, their configurations and presets. `config` and `presets` load without torch."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

if TYPE_CHECKING:
    from clearhead.models.config import AttentionConfig as AttentionConfig
    from clearhead.models.config import LanguageConfig as LanguageConfig
    from clearhead.models.config import PredictorConfig as PredictorConfig
    from clearhead.models.config import Seq2SeqConfig as Seq2SeqConfig
    from clearhead.models.config import VisionConfig as VisionConfig
    from clearhead.models.config import build_model as build_model
    from clearhead.models.generate import Beam as Beam
    from clearhead.models.generate import GenerateOutput as GenerateOutput
    from clearhead.models.generate import Greedy as Greedy
    from clearhead.models.generate import Sampling as Sampling
    from clearhead.models.language import LanguageModel as LanguageModel
    from clearhead.models.mask_view import read_mask as read_mask
    from clearhead.models.predictor import SequencePredictor as SequencePredictor
    from clearhead.models.presets import list_presets as list_presets
    from clearhead.models.presets import preset as preset
    from clearhead.models.seq2seq import Ensemble as Ensemble
    from clearhead.models.seq2seq import Seq2Seq as Seq2Seq
    from clearhead.models.steps import five_steps as five_steps
    from clearhead.models.vit import VisionTransformer as VisionTransformer

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.models.config": (
            "PredictorConfig",
            "VisionConfig",
            "Seq2SeqConfig",
            "LanguageConfig",
            "AttentionConfig",
            "build_model",
        ),
        "clearhead.models.predictor": ("SequencePredictor",),
        "clearhead.models.vit": ("VisionTransformer",),
        "clearhead.models.seq2seq": ("Seq2Seq", "Ensemble"),
        "clearhead.models.language": ("LanguageModel",),
        "clearhead.models.generate": ("Greedy", "Sampling", "Beam", "GenerateOutput"),
        "clearhead.models.presets": ("list_presets", "preset"),
        "clearhead.models.steps": ("five_steps",),
        "clearhead.models.mask_view": ("read_mask",),
    },
)
