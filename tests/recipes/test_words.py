from clearhead.recipes import config_of


def test_vocab_size_follows_the_word_list(tmp_path):
    config = config_of("words", {"data.limit": 5})
    assert config.model.vocab_size == len(config.data.load(0).vocab)
    (tmp_path / "names.txt").write_text("Ada\nBob\n")
    assert config_of("words", {"data.file": str(tmp_path / "names.txt")}).model.vocab_size == 3 + 6
