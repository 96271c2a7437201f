import pytest

from clearhead.cli.options import closest_option

KNOWN = ["--name", "--seed", "--training.steps", "--optimizer.lr", "--model.width", "--data.limit", "--model.depth"]


@pytest.mark.parametrize(
    ("option", "expected"),
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
def test_nearest_option_by_full_name_or_last_part(option, expected):
    assert closest_option(option, KNOWN) == expected


def test_leading_dashes_do_not_count_as_similarity():
    assert closest_option("--heads", ["--beta", "--causal"]) is None
