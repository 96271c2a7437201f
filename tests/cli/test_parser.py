import pytest

from clearhead.cli.options import nearest

KNOWN = ["--name", "--seed", "--training.steps", "--optimizer.lr", "--model.width", "--data.limit", "--model.depth"]


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--nmae", "--name"),
        ("--steps", "--training.steps"),
        ("--step", "--training.steps"),
        ("--lr", "--optimizer.lr"),
        ("--optim.lr", "--optimizer.lr"),
        ("--optimizer.learning-rate", "--optimizer.lr"),
        ("--modle.widht", "--model.width"),
        ("--learning-rate", "--optimizer.lr"),
        ("--model.dim", "--model.width"),
        ("--num-layers", "--model.depth"),
        ("--zzz", None),
    ],
)
def test_the_nearest_option_by_its_whole_name_or_its_last_part(option, answer):
    assert nearest(option, KNOWN) == answer


def test_dashes_are_no_resemblance():
    assert nearest("--heads", ["--beta", "--causal"]) is None
