import pytest
import torch

from clearhead.data.sequences import load_splits
from clearhead.data.vocab import EOS, Vocabulary
from clearhead.tasks.pronounce import Pronounce

CONFIG = Pronounce(validation=700)
DATA = CONFIG.load(0)


SPLITS = load_splits(CONFIG)


def words_in(examples):
    source, _ = examples.get_batch(torch.arange(len(examples)))
    return {"".join(Vocabulary(DATA.vocab).decode(row)) for row in source.tolist()}


def test_splits_are_disjoint_and_cover_the_dictionary():
    train, validation, test = (set(SPLITS[name]) for name in ("train", "validation", "test"))
    assert words_in(DATA.validation) == validation
    assert not train & validation
    assert not (train | validation) & test
    assert len(train) + len(validation) + len(test) == 126_052
    assert len(validation) == 700
    assert 126_052 / 21 < len(test) < 126_052 / 19


def test_splits_do_not_depend_on_seed_stress_or_limit():
    config = Pronounce(validation=700, stress=True, limit=50)
    other = load_splits(config)
    assert [set(other[name]) for name in ("validation", "test")] == [
        set(SPLITS[name]) for name in ("validation", "test")
    ]
    assert list(other["train"]) == list(SPLITS["train"])[:50]
    assert words_in(config.load(1).train) == set(other["train"])


def test_an_example_is_letters_and_phones_with_eos():
    source, target = DATA.train.get_batch(torch.arange(3))
    (word, known), *_ = SPLITS["train"].items()
    assert "".join(Vocabulary(DATA.vocab).decode(source[0].tolist())) == word
    written = target[0][target[0] >= 0].tolist()
    assert written[-1] == EOS
    assert tuple(Vocabulary(DATA.classes).decode(written)) == known[0]


def test_each_pronunciation_is_an_example():
    assert len(DATA.train) == sum(map(len, SPLITS["train"].values()))
    assert max(map(len, SPLITS["train"].values())) > 2


@pytest.fixture
def user_files(tmp_path):
    (tmp_path / "my.train").write_text("".join(f"{a}{b}\tAA B\n" for a in "abcd" for b in "abcd"))
    (tmp_path / "my.test").write_text("ab\tB AA\ndd\tAA\n")
    return {"train_file": str(tmp_path / "my.train"), "test_file": str(tmp_path / "my.test")}


def test_test_file_words_are_excluded_from_training(user_files):
    config = Pronounce(validation=3, **user_files)
    found = load_splits(config)
    assert {name: len(words) for name, words in found.items()} == {"train": 11, "validation": 3, "test": 2}
    assert found["test"]["ab"] == (("B", "AA"),)
    assert config.load(0).vocab[3:] == tuple("abcd")


def test_without_a_test_file_a_user_dictionary_has_no_test_split(user_files):
    found = load_splits(Pronounce(validation=3, train_file=user_files["train_file"]))
    assert {name: len(words) for name, words in found.items()} == {"train": 13, "validation": 3, "test": 0}


def test_a_user_test_file_replaces_the_embedded_test_split(user_files):
    found = load_splits(Pronounce(validation=3, test_file=user_files["test_file"]))
    assert set(found["test"]) == {"ab", "dd"}
    assert "ab" not in found["train"]


def test_a_test_word_with_an_unknown_letter_is_named_in_the_error(user_files, tmp_path):
    (tmp_path / "my.test").write_text("xa\tAA\n")
    with pytest.raises(LookupError, match=r"my\.test: unknown token 'x' in 'xa'; the vocabulary is 'abcd'"):
        Pronounce(validation=3, **user_files).load(0)
