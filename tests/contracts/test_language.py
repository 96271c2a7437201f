"""The project's own dialect stays out of it: phrases that no reader of PyTorch's documentation would recognize."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = sorted(
    [
        *(ROOT / "src/clearhead").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        *ROOT.glob("*.md"),
    ]
)
BANNED = {
    r"\(now [^-)][^)]*\)": "(default: ...)",
    r"\bgo(es|ing)? on with\b": "resume, continue",
    r"\bworked off\b": "processed",
    r"\bportions?\b": "microbatches",
    r"\blearnt\b": "learned",
    r"\bspoilt\b": "corrupted",
    r"\bof 2017\b": "Vaswani et al., 2017",
    r"\bfor want of\b": "to save",
    r"\bwhole or not there\b": "atomic",
    r"\bleaves nothing\b": "then exits",
    r"\bfor programs\b": "machine-readable",
    r"\btakes? for which\b": "confusion matrix",
    r"\blikelier\b": "more probable",
    r"\bbolder\b": "sampling temperature",
    r"\bnumbers? without a state\b": "counter-based random numbers",
    r"\banswer(s|ed)? together\b": "ensemble",
    r"\bset apart\b(?!\")": "held out",
    r"\bwhat came of it\b": "results",
    r"\bas it likes\b": "unconstrained",
    r"\bby no means\b": "not",
    r"\bstands? nowhere\b": "has no position",
    r"\bhow English words are said\b": "pronunciation of English words",
    r"\bwords that nobody has written\b": "new words",
    r"\bmixed-up\b": "shuffled",
    r"\bchoose one of the two\b": "",
    r"; write some\b": "",
    r"\blonger one is shortened\b": "clip the gradient norm",
    r"\bgot too little\b": "out of memory",
    r"\bR[0-4]\.\d{1,2}\b": "no codes",
    r"\bthe readout looks at\b": "the pooled token attends to",
    r"\bmay see nothing\b": "is fully masked",
    r"\bat one place\b": "in one place",
    r"\bsaid so\b": "reported",
    r"\btold (of|from|that|by)\b": "informed, distinguished",
    r"\bthe likeliest\b": "the most probable",
}


@pytest.mark.parametrize("phrase", BANNED)
def test_banned_phrases_do_not_occur(phrase):
    pattern = re.compile(phrase)
    places = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not places, f"write {BANNED[phrase]!r} instead:\n" + "\n".join(places)


def test_banned_phrases_are_detected():
    """The patterns match what they are meant to keep out."""
    examples = ["(now 3)", "go on with a run that was stopped", "the encoder-decoder of 2017", "see R4.5", "learnt"]
    assert all(any(re.search(phrase, example) for phrase in BANNED) for example in examples)
