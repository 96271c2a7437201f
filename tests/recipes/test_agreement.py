import pytest

from clearhead.recipes.registry import config_of, validate, with_changes

MNIST = config_of("mnist")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "digits",
            {"objective": "regression"},
            "digits with question=most-common needs objective=classification, got regression",
        ),
        ("digits", {"model.out_features": 1}, "digits with question=most-common needs out_features=10, got 1"),
        ("digits", {"model.pooling": "none"}, "needs pooling=mean, cls or attention, got none"),
        ("reverse", {"model.pooling": "mean"}, "reverse needs pooling=none, got mean"),
        ("reverse", {"model.in_features": 9}, "reverse needs in_features=10, got 9"),
        ("odd-one-out", {"model.in_features": 10}, "odd-one-out needs in_features=784, got 10"),
        ("odd-one-out", {"objective": "classification"}, "odd-one-out needs objective=set-pointer, got classification"),
        (
            "mnist",
            {"objective": "token-classification"},
            "mnist needs objective=classification, got token-classification",
        ),
        (
            "mnist",
            {"model.image_size": 32},
            "mnist has images of 28 x 28 with in_channels=1, got a model for 32 x 32 with in_channels=1",
        ),
        ("mnist", {"model.in_channels": 3}, "got a model for 28 x 28 with in_channels=3"),
        ("mnist", {"model.num_classes": 5}, "mnist has 10 classes, got num_classes=5"),
        ("folder", {}, "data.folder is empty; run: clearhead train folder --data.folder PATH"),
        ("text", {}, "data.file is empty; run: clearhead train text --data.file PATH"),
        ("words", {"objective": "token-classification"}, "words needs objective=causal-lm, got token-classification"),
    ],
)
def test_what_does_not_fit_together_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(name, changes)


def test_the_right_kind_of_model():
    with pytest.raises(ValueError, match="mnist needs a VisionConfig, got a PredictorConfig"):
        validate(with_changes(MNIST, {"model": config_of("reverse").model}))
    with pytest.raises(ValueError, match="pronounce needs a Seq2SeqConfig, got a LanguageConfig"):
        validate(with_changes(config_of("pronounce"), {"model": config_of("words").model}))
    with pytest.raises(ValueError, match="reverse needs a PredictorConfig, got a VisionConfig"):
        validate(with_changes(config_of("reverse"), {"model": MNIST.model}))


def test_a_table_of_positions_must_reach_as_far_as_is_read(tmp_path):
    (tmp_path / "my.txt").write_text("words, words, words. " * 50)
    changes = {"data.file": str(tmp_path / "my.txt"), "model.pos_embed": "learned"}
    assert config_of("text", changes | {"data.length": 20}).model.context_length == 20
    with pytest.raises(ValueError, match=r"context_length must be at least data.length=64 .* got 32"):
        config_of("text", changes | {"model.context_length": 32})
    assert (
        config_of("words", {"model.pos_embed": "learned", "model.context_length": 9}).data.length > 9
    )  # of no effect there
