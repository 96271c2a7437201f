import pytest

from clearhead.recipes import config_of


def test_vocab_size_and_context_length_follow_the_text(tmp_path):
    (tmp_path / "my.txt").write_text("hello é")
    file = {"data.file": str(tmp_path / "my.txt")}
    assert config_of("text", file).model.vocab_size == len(set("hello é"))
    assert config_of("text", file | {"data.level": "byte"}).model.vocab_size == 256
    assert config_of("text", file | {"data.length": 100}).model.context_length == 100


def test_a_missing_text_file_raises():
    with pytest.raises(FileNotFoundError):
        config_of("text", {"data.file": "nowhere.txt"})
