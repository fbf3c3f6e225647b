"""Drawings of the example: what is rendered of unfinished and of hostile texts."""

from __future__ import annotations

import base64
from xml.etree import ElementTree

import pytest

from examples.svg.svg import HERE, closed, likeness
from specrej.contracts import Prompt
from tests.programs import ROOT

PROMPT = Prompt.from_user("Draw.")
DATA = {"target": base64.b64encode((HERE / "target.png").read_bytes()).decode()}
SVG = (
    '<svg viewBox="0 0 64 64"><g><rect width="64" height="64" fill="blue"/></g>'
    '<circle cx="32" cy="32" r="20" fill="red"></circle></svg>'
)
RENDERS = pytest.mark.skipif(not (ROOT / ".svg").exists(), reason="no .svg: make .svg/.installed")


@pytest.fixture(autouse=True)
def _renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".svg"))


def scores(*texts: str, has_ended: bool = True) -> list[float]:
    return likeness(PROMPT, texts, finished=[has_ended] * len(texts), data=DATA)


def test_every_beginning_is_closed_to_a_document() -> None:
    """Guards against an open tag, or one that is cut in its middle."""
    text = f"Here it is:\n```svg\n{SVG}\n```\nIt has a circle."
    shapes = []
    for end in range(len(text) + 1):
        svg = closed(text[:end])
        shapes.append(len([*ElementTree.fromstring(svg).iter()]) if svg else 0)
    assert shapes == sorted(shapes)
    assert (shapes[0], shapes[-1]) == (0, 4)
    assert "It has" not in closed(text)


@pytest.mark.parametrize(
    "text",
    [
        '<svg><image href="file:///etc/passwd"/></svg>',
        '<svg><g xlink:href="#a"/></svg>',
        "<svg><style>* {}</style></svg>",
        '<svg><rect style="fill: red"/></svg>',
        '<svg><rect fill="url(#a)"/></svg>',
        '<!DOCTYPE svg [<!ENTITY a "b">]><svg><g>&a;</g></svg>',
        "<svg><script>alert(1)</script></svg>",
        "<svg><filter/></svg>",
        "<svg></g></svg>",
        "<svg><!-- a --></svg>",
    ],
)
def test_what_is_more_than_shapes_is_not_rendered(text: str) -> None:
    with pytest.raises(ValueError, match=r"here|references"):
        closed(text)
    assert scores(text) == [-1.0]


def test_texts_without_a_drawing() -> None:
    assert scores("No.", "") == [-1.0, -1.0]
    assert scores("Here it", "<svg", has_ended=False) == [0.0, 0.0]


@RENDERS
def test_likeness_is_between_white_paper_and_the_target() -> None:
    square = SVG.partition("<circle")[0]
    white, black = (square.replace("blue", colour) for colour in ("white", "black"))
    equal, paper, half, dark = scores(SVG, white, square, black)
    assert (equal, paper) == (1.0, 0.0)
    assert dark < half < 1
    assert scores(square[:-4], has_ended=False) == [half]
    assert scores("<svg/>") == [0.0]  # it has no size
