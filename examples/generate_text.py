"""Train a language model on a text of your own, and let it write at several temperatures.

python examples/generate_text.py
"""

from pathlib import Path

import clearhead

VERSE = """\
Twinkle, twinkle, little star,
How I wonder what you are!
Up above the world so high,
Like a diamond in the sky.
"""


def main() -> None:
    Path("verse.txt").write_text(VERSE * 60)
    changes = {
        "data.file": "verse.txt",
        "data.length": 48,
        "data.validation": 100,
        "model.depth": 2,
        "model.width": 64,
        "model.mlp_dim": 256,
        "training.steps": 150,
        "training.threads": 1,
    }
    clearhead.train("text", "verse", changes=changes, resume=True)

    run = clearhead.open_run("verse")
    for temperature in (0.2, 1.0, 3.0):
        strategy = clearhead.Sampling(temperature=temperature, seed=0)
        (text,) = run.sample("Twinkle", max_new_tokens=80, strategy=strategy)
        print(f"\ntemperature {temperature}:\n{text}")
    print("\nattention layers for the prompt 'Twinkle, ':")
    print(run.look("Twinkle, "))


if __name__ == "__main__":
    main()
