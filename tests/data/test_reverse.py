import torch

from clearhead.data.datasets import DataConfig, load_dataset

DATA = load_dataset(DataConfig(name="reverse", validation=500), seed=1)
ALL = torch.arange(500)


def test_the_answer_is_the_digits_backwards():
    ids, answers = DATA.train.get_batch(ALL)
    assert ids.shape == (500, 16)
    assert ids.dtype == answers.dtype == torch.int64
    assert ids.unique().tolist() == list(range(10))
    assert torch.equal(ids.flip(1), answers)


def test_any_sequence_can_be_had_alone():
    ids, _ = DATA.train.get_batch(ALL)
    assert torch.equal(DATA.train.get_batch(torch.tensor([77, 3]))[0], ids[[77, 3]])


def test_no_sequence_is_in_two_parts_or_twice_in_one():
    parts = [part.get_batch(torch.arange(len(part)))[0] for part in (DATA.train, DATA.validation, DATA.test)]
    assert [len(part) for part in parts] == [50_000, 500, 10_000]
    assert len(torch.cat(parts).unique(dim=0)) == 60_500


def test_another_seed_has_other_sequences():
    other = load_dataset(DataConfig(name="reverse"), seed=2)
    assert not (DATA.train.get_batch(ALL)[0] == other.train.get_batch(ALL)[0]).all(1).any()


def test_the_config_says_how_long_and_how_many():
    data = load_dataset(DataConfig(name="reverse", length=5, limit=30, validation=3), seed=0)
    assert (len(data.train), len(data.validation)) == (30, 3)
    assert data.train.get_batch(torch.arange(30))[0].shape == (30, 5)
