"""`clearhead sample`: a run of words or text writes something of its own."""

from collections.abc import Sequence

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import json_text, printable

ABOUT = """\
What a language model writes: new words (a run of words), or how a text goes on
(a run of text). Tokens are drawn by their probability: a temperature below 1
prefers likely ones, --top-k and --top-p leave unlikely ones out."""

EXAMPLES = """\
examples
  clearhead sample runs/words-0
  clearhead sample runs/words-0 --prompt un --n 5 --temperature 0.7 --seed 1
  clearhead sample runs/text-0 --prompt "Once upon a time" --tokens 500 --top-k 40"""

WORDS, TEXTS = 10, 1
"""how many are written unless said"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead sample", ABOUT)
    options.usage = "clearhead sample RUN [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/words-0")
    options.add_argument("--prompt", metavar="TEXT", default="", help="how it begins (now nothing)")
    options.add_argument("--n", metavar="N", type=reader(int), help=f"how many (words: {WORDS}, text: {TEXTS})")
    options.add_argument("--tokens", metavar="N", type=reader(int), default=300, help="text: how long (now 300)")
    options.add_argument(
        "--temperature", metavar="X", type=reader(float), default=1.0, help="below 1 likelier, above 1 bolder (now 1)"
    )
    options.add_argument("--top-k", metavar="N", type=reader(int), help="only the N likeliest tokens")
    options.add_argument("--top-p", metavar="X", type=reader(float), help="only the fewest that hold this share")
    options.add_argument("--seed", metavar="N", type=reader(int), help="the same number writes the same again")
    options.add_argument("--json", action="store_true", help="for programs")
    args = options.parse(argv)

    from clearhead.models.generate import Sampling
    from clearhead.serving.sampling import sample
    from clearhead.serving.session import Session

    how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    session = Session(args.run)
    usual = TEXTS if session.config.data.name == "text" else WORDS
    n = usual if args.n is None else args.n
    written = sample(session, args.prompt, how, n=n, n_tokens=args.tokens)
    if args.json:
        print(json_text(written))
    elif session.config.data.name == "text":
        print("\n".join(written))
    else:
        print("\n".join(map(printable, written)))  # a word is one line
