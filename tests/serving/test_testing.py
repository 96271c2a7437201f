import pytest

from clearhead.serving.session import Session
from clearhead.serving.testing import confusion
from clearhead.training.run import RunDirectory


@pytest.mark.parametrize(("name", "n"), [("mnist", 10_000), ("reverse", 160_000), ("repeat", 10_000)])
def test_the_diagonal_is_the_accuracy_of_the_test(trained, name, n):
    session = Session(trained / name)
    matrix = confusion(session)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    assert matrix.shape == (len(session.classes),) * 2
    assert matrix.sum() == n
    assert matrix.trace().item() / n == pytest.approx(record["accuracy"], abs=2 / n)


def test_numbers_cannot_be_confused(trained):
    with pytest.raises(
        ValueError, match=r"classes can be confused, got .*sum, .*; measure it with: clearhead evaluate"
    ):
        confusion(Session(trained / "sum"))
