"""`pronounce`: words and their phones, from the embedded CMU dictionary or from the user's own.

No word is in two parts, and neither seed nor order decides which: of the embedded dictionary a twentieth of the words,
by the digest of their spelling, is the test set; of what is left, the words with the smallest digests validate. Of the
user's own, `train_file` is learnt and validated on in the same way, and `test_file`, if there is one, is the test set.
A word with several pronunciations is an example for each of them.
"""

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.datasets import DataConfig
from clearhead.data.vocab import (
    EOS,
    Pronunciations,
    Vocabulary,
    apart,
    embedded,
    for_testing,
    letters_in,
    phones_in,
    read_dictionary,
)


def load_pronounce(config: DataConfig, seed: int) -> Dataset:
    known, tested = dictionaries(config)
    letters, phones = (
        Vocabulary.with_special_tokens(letters_in(known)),
        Vocabulary.with_special_tokens(phones_in(known)),
    )
    if config.test_file:
        check_vocab(tested, letters, phones, config.test_file)
    train, validation, test = (pairs(part, letters, phones) for part in divided(known, tested, config).values())
    return Dataset(train, validation, test, classes=phones.tokens, normalize=None, vocab=letters.tokens)


def check_vocab(words: Pronunciations, letters: Vocabulary, phones: Vocabulary, file: object) -> None:
    """Of words in a file that the vocabularies were not made from."""
    try:
        for word, known in words.items():
            letters.encode(word)
            for each in known:
                phones.encode(each)
    except LookupError as error:
        raise LookupError(f"{file}: {error}, or remove its line") from None


def parts(config: DataConfig) -> dict[str, Pronunciations]:
    """The words of each part: train, validation, test."""
    return divided(*dictionaries(config), config)


def divided(known: Pronunciations, tested: Pronunciations, config: DataConfig) -> dict[str, Pronunciations]:
    learned, held = apart((word for word in known if word not in tested), config.validation)
    learned = learned[: config.limit] if config.limit else learned
    chosen = {name: {word: known[word] for word in words} for name, words in (("train", learned), ("validation", held))}
    return chosen | {"test": tested}


def dictionaries(config: DataConfig) -> tuple[Pronunciations, Pronunciations]:
    """All words with letters and phones to be learnt, and those to be tested on, which may be among them."""
    if config.train_file:
        tested = read_dictionary(config.test_file, stress=config.stress) if config.test_file else {}
        return read_dictionary(config.train_file, stress=config.stress), tested
    if config.test_file:
        return embedded(stress=config.stress), read_dictionary(config.test_file, stress=config.stress)
    known = embedded(stress=config.stress)
    _, tested_words = for_testing(known)
    return known, {word: known[word] for word in tested_words}


def pairs(words: Pronunciations, letters: Vocabulary, phones: Vocabulary) -> SequencePairs:
    """An example for each pronunciation of each of the words."""
    chosen = [(word, each) for word, known in words.items() for each in known]
    sources = [letters.encode(word) for word, _ in chosen]
    return SequencePairs.of(sources, [[*phones.encode(each), EOS] for _, each in chosen])
