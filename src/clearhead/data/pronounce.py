"""`pronounce`: words and their phones, from the embedded CMU dictionary or the user's own.

No word is in two splits, and the split depends on the spelling alone, not on the seed or the order of the file. In the
embedded dictionary, one word in twenty is in the test set, and of the others those with the smallest hashes are held
out for validation. With the user's own files, `train_file` is split into training and validation in the same way, and
`test_file`, if given, is the test set. Each pronunciation of a word is an example.
"""

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.options import DictionaryOptions
from clearhead.data.vocab import (
    EOS,
    Pronunciations,
    Vocabulary,
    letters_in,
    phones_in,
    read_cmudict,
    read_dictionary,
    split_test,
    split_validation,
)


def load_pronounce(config: DictionaryOptions) -> Dataset:
    words, test_words = read_dictionaries(config)
    letters = Vocabulary.with_special_tokens(letters_in(words))
    phones = Vocabulary.with_special_tokens(phones_in(words))
    if config.test_file:
        check_vocab(test_words, letters, phones, config.test_file)
    splits = split_words(words, test_words, config)
    train, validation, test = (encode_pairs(split, letters, phones) for split in splits.values())
    return Dataset(train, validation, test, classes=phones.tokens, normalize=None, vocab=letters.tokens)


def check_vocab(words: Pronunciations, letters: Vocabulary, phones: Vocabulary, file: object) -> None:
    """Raises LookupError if a word of the file has a letter or a phone that is not in the vocabularies."""
    try:
        for word, variants in words.items():
            letters.encode(word)
            for variant in variants:
                phones.encode(variant)
    except LookupError as error:
        raise LookupError(f"{file}: {error}") from None


def load_splits(config: DictionaryOptions) -> dict[str, Pronunciations]:
    """The words of each split: train, validation, test."""
    return split_words(*read_dictionaries(config), config)


def split_words(
    words: Pronunciations, test_words: Pronunciations, config: DictionaryOptions
) -> dict[str, Pronunciations]:
    train, validation = split_validation((word for word in words if word not in test_words), config.validation)
    train = train[: config.limit] if config.limit else train
    return {
        "train": {word: words[word] for word in train},
        "validation": {word: words[word] for word in validation},
        "test": test_words,
    }


def read_dictionaries(config: DictionaryOptions) -> tuple[Pronunciations, Pronunciations]:
    """The words that define the vocabularies, and the test words, which may be among them."""
    if config.train_file:
        test_words = read_dictionary(config.test_file, stress=config.stress) if config.test_file else {}
        return read_dictionary(config.train_file, stress=config.stress), test_words
    if config.test_file:
        return read_cmudict(stress=config.stress), read_dictionary(config.test_file, stress=config.stress)
    words = read_cmudict(stress=config.stress)
    _, test = split_test(words)
    return words, {word: words[word] for word in test}


def encode_pairs(words: Pronunciations, letters: Vocabulary, phones: Vocabulary) -> SequencePairs:
    """One example for each pronunciation of each word: letter ids -> phone ids and EOS."""
    examples = [(word, variant) for word, variants in words.items() for variant in variants]
    sources = [letters.encode(word) for word, _ in examples]
    return SequencePairs.of(sources, [[*phones.encode(variant), EOS] for _, variant in examples])
