"""What data, model and objective must agree on: checked before anything is trained."""

from clearhead.data.config import DataConfig
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.recipes.digits import ANSWERING
from clearhead.training.config import ObjectiveName, RunConfig

N_CLASSES = 10
"""of every data set here but the user's own"""
OBJECTIVES: dict[str, ObjectiveName] = {
    "reverse": "token-classification",
    "odd-one-out": "set-pointer",
    "pronounce": "seq2seq",
    "words": "causal-lm",
    "text": "causal-lm",
}
"""images are asked for their class; digits: see ANSWERING"""
WRITERS: dict[str, type] = {"seq2seq": Seq2SeqConfig, "causal-lm": LanguageConfig}
"""the model that each of these objectives is for"""
IMAGES = {"mnist": (1, 28), "fashion-mnist": (1, 28), "cifar10": (3, 32)}
"""channels, and height and width"""


def validate(config: RunConfig) -> None:
    data, asked = config.data, objective_of(config.data)
    what = f"digits with question={data.question}" if data.name == "digits" else data.name
    if config.objective != asked:
        raise ValueError(
            f"{what} needs objective={asked}, got {config.objective}; leave objective and data as they are, or choose "
            "another recipe"
        )
    if data.name == "folder" and not data.folder:
        raise ValueError("own pictures need their folder, got none; run: clearhead train folder --data.folder PATH")
    if data.name == "text" and not data.file:
        raise ValueError("a text is learnt from a file, got none; add --data.file PATH")
    if data.name in (*IMAGES, "folder"):
        check_vision(config.model, data)
    elif asked in WRITERS:
        check_writer(config.model, data, WRITERS[asked])
    else:
        check_predictor(config.model, what, asked)


def objective_of(data: DataConfig) -> ObjectiveName:
    return ANSWERING[data.question].objective if data.name == "digits" else OBJECTIVES.get(data.name, "classification")


def check_vision(model: object, data: DataConfig) -> None:
    if not isinstance(model, VisionConfig):
        raise ValueError(f"{data.name} has images, which a VisionConfig is for, got a {type(model).__name__}; take one")
    channels, size = IMAGES.get(data.name, (3, data.image_size))
    if (model.in_channels, model.image_shape) != (channels, (size, size)):
        raise ValueError(
            f"{data.name} has images of {size} x {size} with {channels} channels, got a model for "
            f"{model.image_shape[0]} x {model.image_shape[1]} with {model.in_channels}; build it for those"
        )
    if data.name != "folder" and model.num_classes < N_CLASSES:
        raise ValueError(
            f"{data.name} has {N_CLASSES} classes, got num_classes={model.num_classes}; set it to {N_CLASSES}"
        )


def check_writer(model: object, data: DataConfig, kind: type) -> None:
    if not isinstance(model, kind):
        raise ValueError(f"{data.name} needs a {kind.__name__}, got a {type(model).__name__}; take one")
    if data.name != "text" or not isinstance(model, LanguageConfig) or model.pos_embed != "learned":
        return
    if model.context_length < data.length:
        raise ValueError(
            f"a model that reads {data.length} at once needs context_length={data.length}, "
            f"got {model.context_length}; set it to that"
        )


def check_predictor(model: object, what: str, asked: ObjectiveName) -> None:
    if not isinstance(model, PredictorConfig):
        raise ValueError(
            f"{what} has sequences, which a PredictorConfig is for, got a {type(model).__name__}; take one"
        )
    out_features = N_CLASSES if asked in ("classification", "token-classification") else 1
    if model.out_features != out_features:
        raise ValueError(f"{what} needs out_features={out_features}, got {model.out_features}; set it to that")
    if (model.pooling == "none") != (asked in ("token-classification", "set-pointer")):
        wanted = "each" if asked in ("token-classification", "set-pointer") else "mean, class or attention"
        raise ValueError(f"{what} needs an answer from pooling={wanted}, got {model.pooling}; choose that")
    in_features = 784 if asked == "set-pointer" else N_CLASSES
    if model.in_features != in_features:
        raise ValueError(f"{what} needs in_features={in_features}, got {model.in_features}; set it to that")
