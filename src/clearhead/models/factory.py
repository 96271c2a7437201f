"""From any config to its model."""

from torch import nn

from clearhead.models.config import LanguageConfig, ModelConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.models.language import LanguageModel
from clearhead.models.predictor import SequencePredictor
from clearhead.models.seq2seq import Seq2Seq
from clearhead.models.vit import VisionTransformer


def build_model(config: ModelConfig) -> nn.Module:
    match config:
        case PredictorConfig():
            return SequencePredictor.from_config(config)
        case VisionConfig():
            return VisionTransformer.from_config(config)
        case Seq2SeqConfig():
            return Seq2Seq.from_config(config)
        case LanguageConfig():
            return LanguageModel.from_config(config)
    raise TypeError(f"a model config is one of Predictor-, Vision-, Seq2Seq- and LanguageConfig, got {type(config)}")
