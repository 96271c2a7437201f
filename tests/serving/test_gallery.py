import torch

from clearhead.serving.gallery import COLUMNS, Shown, draw_gallery, gallery_of_test
from clearhead.serving.session import Session


def texts(figure):
    return [text.get_text() for block in figure.subfigs for axes in block.axes for text in axes.texts]


def test_each_picture_has_its_answer_and_a_wrong_one_the_right_answer():
    image = torch.zeros(1, 4, 4, dtype=torch.uint8)
    colour = torch.zeros(3, 4, 4, dtype=torch.uint8)
    figure = draw_gallery({"a": [Shown(image, "7", 0.98, "7")] * (COLUMNS + 1), "b": [Shown(colour, "1", 0.5, "2")]})
    assert texts(figure) == ["7  98%"] * (COLUMNS + 1) + ["1  50%\n(it is 2)"]


def test_without_mistakes_there_is_one_block():
    figure = draw_gallery({"a": [Shown(torch.zeros(1, 4, 4, dtype=torch.uint8), "7", 0.98)], "b": []})
    assert len(figure.subfigs) == 1


def test_the_worst_mistakes_come_first(trained):
    figure = gallery_of_test(Session(trained / "mnist"), n=3)
    mistakes = texts(figure)[3:]
    assert len(mistakes) == 3
    assert all("(it is" in text for text in mistakes)
    sure = [int(text.split()[1].removesuffix("%")) for text in mistakes]
    assert sure == sorted(sure, reverse=True)
