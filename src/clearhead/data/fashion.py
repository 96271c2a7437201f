"""`fashion`: Fashion-MNIST, 60,000 + 10,000 pictures of clothes of 28 x 28 pixels, by Zalando Research (MIT)."""

from pathlib import Path

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet, Images, Normalise, set_apart
from clearhead.data.idx import gunzip, images_and_labels
from clearhead.data.sources import Here, Web
from clearhead.data.store import Files, Stored, pick, read

CLASSES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
NORMALISE = Normalise(mean=(0.2860,), std=(0.3530,))
MOST = 50_000_000
DIGESTS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
SITES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
)


def decode(files: Files) -> Files:
    """The four idx files, unpacked where they are gzipped."""
    plain = {name.removesuffix(".gz"): gunzip(data, name, MOST) for name, data in files.items()}
    return pick(plain, list(DIGESTS))


STORED = Stored(
    name="fashion",
    digests=DIGESTS,
    wanted=frozenset([*DIGESTS, *(f"{name}.gz" for name in DIGESTS)]),
    decode=decode,
    sources=(
        Here(Path("/usr/share/datasets/fashion-mnist"), origin="from the Debian package dataset-fashion-mnist"),
        *(Web(tuple(f"{site}/{name}.gz" for name in DIGESTS), most=MOST) for site in SITES),
    ),
)


def load(config: DataConfig, seed: int) -> DataSet:
    train, validation = set_apart(pictures("train"), config.validation, config.limit, seed)
    return DataSet(train, validation, pictures("t10k"), CLASSES, NORMALISE)


def pictures(part: str) -> Images:
    images, labels = (read(STORED, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(CLASSES))
