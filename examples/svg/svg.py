"""Draw a picture in SVG: candidates are rendered, and ranked by how like the target they are.

The server must have the reward `likeness` of rewards.json, which is the function below: its
process needs the packages of requirements.txt.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from specrej import Prompt, SyncClient, WeightedReward
from specrej.contracts import Grammar

HERE = Path(__file__).parent
SIDE = 64  # pixels of renderings
# Only shapes and groups: no files, fonts, styles or entities.
_ELEMENTS = {"svg", "g", "rect", "circle", "ellipse", "line", "polyline", "polygon", "path"}
_MOST_CHARACTERS = 16_384
_TAG = re.compile(r"<(/?)([a-zA-Z]+)([^<>]*?)(/?)>")
# What the model may write, so that a small one, too, draws something.
_LARK = r"""
start: "<svg viewBox=\"0 0 64 64\">" shape{1,6} "</svg>"
shape: rect | circle
rect: "<rect x=\"" N "\" y=\"" N "\" width=\"" N "\" height=\"" N "\" fill=\"" COLOUR "\"/>"
circle: "<circle cx=\"" N "\" cy=\"" N "\" r=\"" N "\" fill=\"" COLOUR "\"/>"
N: /[1-5]?[0-9]|6[0-4]/
COLOUR: "red" | "green" | "blue" | "yellow" | "orange" | "black" | "gray" | "white"
"""


def likeness(
    prompt: Prompt, responses: Sequence[str], *, finished: Sequence[bool], data: dict[str, str]
) -> list[float]:
    """How like the target a response's SVG is: 1 equal, 0 as like as white paper, at least -1.

    `data`: {"target": PNG or other file in base64}. An unfinished text is drawn with its open tags
    closed; a finished one without a drawing scores -1.
    """
    target = data["target"] if data else ""
    return [
        _score(target, response, has_ended=has_ended)
        for response, has_ended in zip(responses, finished, strict=True)
    ]


def closed(text: str) -> str:
    """The first SVG in a text, without an incomplete tag at its end, and with open tags closed.

    Raises:
        ValueError: it has something else than shapes, or is not well-formed.
    """
    begin = text.find("<svg")
    svg, end, _ = text[max(0, begin) :].partition("</svg>")
    svg = (svg + end)[:_MOST_CHARACTERS]
    if svg.rfind("<") > svg.rfind(">"):
        svg = svg[: svg.rfind("<")]
    if begin < 0 or not svg:
        return ""
    still_open: list[str] = []
    for closes, name, _, is_whole in _TAG.findall(svg):
        if name not in _ELEMENTS or (closes and [name] != still_open[-1:]):
            raise ValueError(f"<{name[:20]}> is not drawn here")
        if closes:
            still_open.pop()
        elif not is_whole:
            still_open.append(name)
    if "&" in svg or "href" in svg or "<!" in svg or "url(" in svg or "style" in svg:
        raise ValueError("there may be no references")
    if "xmlns=" not in svg:
        svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg + "".join(f"</{name}>" for name in reversed(still_open))


def _score(target: str, response: str, *, has_ended: bool) -> float:
    try:
        svg = closed(response)
        if not svg:
            return -1.0 if has_ended else 0.0
        drawn = _rendered(svg)
    except ValueError:
        return -1.0
    wanted = _target(target)
    paper = _distance(b"\xff" * len(wanted), wanted)
    return max(-1.0, 1.0 - _distance(drawn, wanted) / paper) if paper else -1.0


def _rendered(svg: str) -> bytes:
    """Pixels on white. Raises ValueError: it cannot be rendered."""
    import resvg_py

    png = resvg_py.svg_to_bytes(
        svg_string=svg, width=SIDE, height=SIDE, background="#ffffff", skip_system_fonts=True
    )
    return _pixels(png)


@functools.lru_cache(64)
def _target(target: str) -> bytes:
    return _pixels(base64.b64decode(target))


def _pixels(data: bytes) -> bytes:
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGBA")
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    return paper.convert("RGB").resize((SIDE, SIDE)).tobytes()


def _distance(first: bytes, second: bytes) -> float:
    """The mean difference of colours."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def main() -> None:
    """Write the best drawing to a file, and print its score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="a red circle on a blue square")
    parser.add_argument("--target", type=Path, default=HERE / "target.png")
    parser.add_argument("--output", type=Path, default=Path("build/examples/drawing.svg"))
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--no-grammar", dest="grammar", action="store_false")
    options = parser.parse_args()
    target = base64.b64encode(options.target.read_bytes()).decode()
    with SyncClient(os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")) as client:
        generation = client.generate(
            f"Draw in SVG, of 64 by 64 pixels: {options.task}",
            n=options.n,
            max_tokens=160,
            structured_output=Grammar(_LARK) if options.grammar else None,
            rewards=[WeightedReward("likeness", data=json.dumps({"target": target}))],
            seed=1,
            return_candidates=min(4, options.n),
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(generation.best.text)
    scores = ", ".join(f"{candidate.score:.2f}" for candidate in generation.candidates)
    print(f"likeness {scores}; {options.output}")


if __name__ == "__main__":
    main()
