import pytest

from clearhead.recipes import config_of


@pytest.mark.parametrize("name", ["pronounce", "pronounce-fast"])
@pytest.mark.parametrize("stress", [False, True])
def test_vocab_sizes_match_the_embedded_dictionary(name, stress):
    config = config_of(name, {"data.stress": stress, "data.limit": 5, "data.validation": 5})
    data = config.data.load(0)
    assert (config.model.src_vocab_size, config.model.tgt_vocab_size) == (len(data.vocab), len(data.classes))


def test_vocab_sizes_follow_a_user_dictionary(tmp_path):
    (tmp_path / "my.dict").write_text("ab AA1 B\nba B AA0\nabba AA0 B AA0\n")
    config = config_of("pronounce", {"data.train_file": str(tmp_path / "my.dict")})
    assert (config.model.src_vocab_size, config.model.tgt_vocab_size) == (3 + 2, 3 + 2)
    config = config_of("pronounce-fast", {"data.train_file": str(tmp_path / "my.dict"), "data.stress": True})
    assert (config.model.src_vocab_size, config.model.tgt_vocab_size) == (3 + 2, 3 + 3)


def test_a_missing_dictionary_raises():
    with pytest.raises(FileNotFoundError):
        config_of("pronounce", {"data.train_file": "nowhere.dict"})
