"""Draws the diagrams of docs/figures: the encoder block, the decoder block, the vision transformer, the causal mask.

python docs/make_diagrams.py

The background is transparent. Lines and labels have a gray that is readable on white and on black; text inside a box is
dark on a light fill.
"""

from pathlib import Path

FIGURES = Path(__file__).parent / "figures"
LINE, INK = "#7b8794", "#1f2933"
FILLS = {
    "attention": "#f6c177",
    "mlp": "#9ccfd8",
    "norm": "#e0def4",
    "embed": "#f2b5c4",
    "head": "#b8d8a7",
    "plain": "#e4e7eb",
}
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Drawing:
    """An SVG image. Coordinates are pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height = width, height
        self.parts = [f"<title>{title}</title>"]

    def box(self, x: float, y: float, width: float, height: float, text: str, fill: str) -> None:
        """A rounded box around (x, y) with one or several lines of text."""
        self.parts.append(
            f"<rect x='{x - width / 2:g}' y='{y - height / 2:g}' width='{width:g}' height='{height:g}' rx='6' "
            f"fill='{FILLS[fill]}' stroke='{LINE}' stroke-width='1'/>"
        )
        self.text(x, y, text, color=INK)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        color: str = LINE,
        anchor: str = "middle",
        weight: str = "",
    ) -> None:
        lines = text.split("\n")
        for number, line in enumerate(lines):
            shift = (number - (len(lines) - 1) / 2) * size * 1.25 + size * 0.35
            bold = f" font-weight='{weight}'" if weight else ""
            self.parts.append(
                f"<text x='{x:g}' y='{y + shift:g}' {FONT} font-size='{size}' fill='{color}' "
                f"text-anchor='{anchor}'{bold}>{line}</text>"
            )

    def plus(self, x: float, y: float) -> None:
        """The addition of a skip connection."""
        self.parts.append(
            f"<circle cx='{x:g}' cy='{y:g}' r='11' fill='{FILLS['plain']}' stroke='{LINE}'/>"
            f"<path d='M{x - 6:g} {y:g}h12M{x:g} {y - 6:g}v12' stroke='{INK}' stroke-width='1.6'/>"
        )

    def arrow(self, *points: tuple[float, float], head: bool = True, dashed: bool = False) -> None:
        """A line through the points, with rounded corners and an arrow head."""
        path = f"M{points[0][0]:g} {points[0][1]:g}"
        for before, corner, after in zip(points, points[1:], points[2:], strict=False):
            start, end = toward(corner, before, 8), toward(corner, after, 8)
            path += f"L{start[0]:g} {start[1]:g}Q{corner[0]:g} {corner[1]:g} {end[0]:g} {end[1]:g}"
        last = toward(points[-1], points[-2], 5) if head else points[-1]
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<path d='{path}L{last[0]:g} {last[1]:g}' fill='none' stroke='{LINE}' stroke-width='1.6'{dash}/>"
        )
        if head:
            self.arrow_head(points[-1], points[-2])

    def arrow_head(self, tip: tuple[float, float], before: tuple[float, float]) -> None:
        x, y = toward(tip, before, 8)
        dx, dy = (tip[1] - y) / 2, (x - tip[0]) / 2
        self.parts.append(
            f"<path d='M{tip[0]:g} {tip[1]:g}L{x + dx:g} {y + dy:g}L{x - dx:g} {y - dy:g}Z' fill='{LINE}'/>"
        )

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame around a block; (x, y) is its top left corner."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='12' fill='{LINE}' "
            f"fill-opacity='0.07' stroke='{LINE}' stroke-dasharray='6 4'/>"
        )

    def svg(self) -> str:
        body = "\n".join(self.parts)
        size = f"width='{self.width}' height='{self.height}' viewBox='0 0 {self.width} {self.height}'"
        return f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>\n{body}\n</svg>\n"


def toward(point: tuple[float, float], other: tuple[float, float], distance: float) -> tuple[float, float]:
    """The point at this distance from `point` on the way to `other`."""
    dx, dy = other[0] - point[0], other[1] - point[1]
    length = (dx * dx + dy * dy) ** 0.5
    return point[0] + dx / length * distance, point[1] + dy / length * distance


SUBLAYERS = {"attention": ("Multi-head\nself-attention", "attention"), "mlp": ("Feed-forward\nnetwork", "mlp")}


def sublayer(d: Drawing, x: float, y: float, text: str, fill: str, norm_first: bool) -> float:
    """Draws x + f(LN(x)) or LN(x + f(x)) upward from (x, y), and returns the height where it ends."""
    rail = x - 110
    if norm_first:
        d.arrow((x, y), (x, y - 40))
        d.box(x, y - 54, 150, 28, "Layer norm", "norm")
        d.arrow((x, y - 68), (x, y - 88))
        d.box(x, y - 112, 150, 48, text, fill)
        d.arrow((x, y - 136), (x, y - 165))
        d.arrow((x, y - 16), (rail, y - 16), (rail, y - 176), (x - 11, y - 176))
        d.plus(x, y - 176)
        return y - 187
    d.arrow((x, y), (x, y - 40))
    d.box(x, y - 64, 150, 48, text, fill)
    d.arrow((x, y - 88), (x, y - 109))
    d.arrow((x, y - 16), (rail, y - 16), (rail, y - 120), (x - 11, y - 120))
    d.plus(x, y - 120)
    d.arrow((x, y - 131), (x, y - 153))
    d.box(x, y - 167, 150, 28, "Layer norm", "norm")
    return y - 181


def encoder_block() -> str:
    d = Drawing(640, 556, "Encoder block with post-norm and with pre-norm")
    for x, norm_first, title, formula in (
        (180, False, "Post-norm", "x ← LN(x + f(x))"),
        (500, True, "Pre-norm", "x ← x + f(LN(x))"),
    ):
        d.frame(x - 145, 108, 250, 402)
        top = sublayer(d, x, 510, *SUBLAYERS["attention"], norm_first)
        top = sublayer(d, x, top, *SUBLAYERS["mlp"], norm_first)
        d.arrow((x, top), (x, 86))
        d.text(x, 530, "x  (L, E)")
        d.text(x, 74, "(L, E)")
        d.text(x - 20, 14, title, size=16, weight="bold")
        d.text(x - 20, 38, formula)
    return d.svg()


def decoder_block() -> str:
    d = Drawing(620, 740, "Decoder block with masked self-attention, cross-attention and a feed-forward network")
    x = 400
    d.frame(x - 145, 72, 270, 610)
    top = sublayer(d, x, 682, "Masked multi-head\nself-attention", "attention", True)
    middle = top
    top = sublayer(d, x, top, "Multi-head\ncross-attention", "attention", True)
    top = sublayer(d, x, top, "Feed-forward\nnetwork", "mlp", True)
    d.arrow((x, top), (x, 52))
    d.text(x, 704, "decoder tokens x  (Q, E)")
    d.text(x, 40, "(Q, E)")
    d.text(x, 14, "Decoder block (pre-norm)", size=16, weight="bold")
    y = middle - 112
    d.box(80, y, 130, 48, "Encoder output\nm  (K, E)", "plain")
    d.arrow((145, y), (x - 75, y))
    d.text(198, y - 12, "keys, values")
    d.text(x + 22, middle - 78, "queries", anchor="start")
    return d.svg()


TOKENS = (("cls", "head"), ("1", "plain"), ("2", "plain"), ("⋮", ""), ("64", "plain"))


def vision_transformer() -> str:
    d = Drawing(980, 400, "Vision transformer")
    y, pixel = 200, 13
    for row in range(8):
        for column in range(8):
            shade = 205 - 9 * abs(row - 3) - 12 * abs(column - 4)
            d.parts.append(
                f"<rect x='{24 + column * (pixel + 2):g}' y='{y - 60 + row * (pixel + 2):g}' width='{pixel}' "
                f"height='{pixel}' fill='rgb({shade - 60},{shade - 25},{shade})'/>"
            )
    d.text(84, 120, "image\n8 × 8 patches")
    d.text(84, 282, "(B, 3, 32, 32)")
    d.arrow((148, y), (176, y))
    d.box(236, y, 116, 66, "Patch\nembedding\n(convolution)", "embed")
    d.text(236, 258, "kernel = stride\n= patch size")
    d.arrow((294, y), (330, y))
    for number, (label, fill) in enumerate(TOKENS):
        top = 84 + number * 58
        if fill:
            d.box(356, top, 44, 34, label, fill)
            d.plus(408, top)
            d.box(460, top, 44, 34, f"p{subscript(label.replace('cls', '0'))}", "norm")
        else:
            d.text(356, top, label, size=18)
            d.text(460, top, label, size=18)
    d.text(356, 32, "tokens")
    d.text(460, 32, "position\nembeddings")
    d.text(408, 358, "(B, 65, E)")
    d.arrow((484, y), (528, y))
    d.frame(530, 62, 150, 276)
    d.box(605, 108, 118, 34, "Feed-forward", "mlp")
    d.box(605, 156, 118, 30, "Layer norm", "norm")
    d.box(605, 228, 118, 44, "Multi-head\nself-attention", "attention")
    d.box(605, 280, 118, 30, "Layer norm", "norm")
    d.text(605, 322, "with skip connections", size=12)
    d.text(605, 46, "encoder block × N")
    d.text(605, 358, "(B, 65, E)")
    d.arrow((605, 265), (605, 250))
    d.arrow((605, 206), (605, 171))
    d.arrow((605, 141), (605, 125))
    d.arrow((680, y), (716, y))
    for number, (label, fill) in enumerate(TOKENS):
        top = 84 + number * 58
        if fill:
            d.box(742, top, 44, 34, label, fill)
        else:
            d.text(742, top, label, size=18)
    d.text(742, 32, "outputs")
    d.arrow((764, 84), (806, 84))
    d.box(866, 84, 118, 30, "Layer norm", "norm")
    d.arrow((866, 99), (866, 132))
    d.box(866, 154, 118, 44, "Classifier\n(linear or MLP)", "head")
    d.arrow((866, 176), (866, 216))
    d.text(866, 232, "logits (B, classes)")
    d.text(866, 46, "z₀  (B, E)")
    return d.svg()


def subscript(number: str) -> str:
    return number.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def causal_mask(tokens: int = 5) -> str:
    size, left, top = 54, 74, 56
    d = Drawing(left + tokens * size + 20, top + tokens * size + 44, "Causal mask of five tokens")
    for i in range(tokens):
        d.text(left - 16, top + (i + 0.5) * size, str(i + 1))
        d.text(left + (i + 0.5) * size, top - 14, str(i + 1))
        for j in range(tokens):
            visible = j <= i
            d.parts.append(
                f"<rect x='{left + j * size + 2}' y='{top + i * size + 2}' width='{size - 4}' height='{size - 4}' "
                f"rx='5' fill='{FILLS['mlp'] if visible else FILLS['plain']}' stroke='{LINE}' stroke-width='0.8'/>"
            )
            d.text(left + (j + 0.5) * size, top + (i + 0.5) * size, "0" if visible else "−∞", color=INK)
    d.text(left + tokens * size / 2, 16, "key j")
    d.text(22, top + tokens * size / 2, "query\ni")
    d.text(left + tokens * size / 2, top + tokens * size + 24, "added to the scores: 0 if j ≤ i, else −∞")
    return d.svg()


DIAGRAMS = {
    "encoder-block": encoder_block,
    "decoder-block": decoder_block,
    "vision-transformer": vision_transformer,
    "causal-mask": causal_mask,
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (FIGURES / f"{name}.svg").write_text(draw(), encoding="utf-8")
