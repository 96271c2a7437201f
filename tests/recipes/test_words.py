from clearhead.data.datasets import load
from clearhead.recipes.all import config_of


def test_the_model_has_the_letters_of_the_words(tmp_path):
    config = config_of("words", {"data.limit": 5})
    assert config.model.n_tokens == len(load(config.data, seed=0).symbols)
    (tmp_path / "names.txt").write_text("Ada\nBob\n")
    assert config_of("words", {"data.file": str(tmp_path / "names.txt")}).model.n_tokens == 3 + 6
