"""Pictures: files that any viewer reads, and parts of a page that live with each other."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ET

import pytest
from matplotlib.axes import Axes

from experiments.figures import gallery, plotting
from experiments.figures.gallery import Gallery
from experiments.studies.analysis import analyse
from experiments.studies.statistics import Estimate
from tests.experiments.synthetic import COMPUTE, WALK, collection

_MOST_BYTES = 60_000  # what is committed stays small


@pytest.fixture(scope="module")
def galleries() -> tuple[Gallery, Gallery]:
    prompts = collection(4, 32, stop_share=0.4)
    walk, likelihood = (
        analyse("64 tokens", prompts, name, compute=COMPUTE, alphas=(0.3, 0.5, 0.8))
        for name in (WALK, "likelihood")
    )
    return gallery.draw(walk), gallery.draw(likelihood)


def test_every_study_has_its_pictures(galleries: tuple[Gallery, Gallery]) -> None:
    walk, likelihood = galleries
    assert len(walk.all()) == 14
    assert len(likelihood.all()) == 15
    assert [each.name for each in likelihood.perplexity] == ["64-tokens-likelihood-perplexity"]
    assert walk.perplexity == ()


def test_files_are_whole_and_small(galleries: tuple[Gallery, Gallery]) -> None:
    for each in [picture for drawn in galleries for picture in drawn.all()]:
        root = ET.fromstring(each.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert each.png.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", each.png[16:24])
        assert width > 400
        assert height > 250
        assert len(each.svg) < _MOST_BYTES, each.name
        assert len(each.png) < _MOST_BYTES, each.name


def test_no_picture_holds_what_is_not_a_number(galleries: tuple[Gallery, Gallery]) -> None:
    for each in [picture for drawn in galleries for picture in drawn.all()]:
        assert not re.search(r"\b(nan|inf)\b", each.svg.lower()), each.name
        assert each.heading
        assert each.title


def test_ids_of_a_page_are_of_one_picture_each(galleries: tuple[Gallery, Gallery]) -> None:
    """Guards against a clip path or a marker of one picture that another one refers to."""
    seen: set[str] = set()
    for each in [picture for drawn in galleries for picture in drawn.all()]:
        ids = re.findall(r'\bid="([^"]+)"', each.inline)
        assert len(ids) == len(set(ids))
        assert not seen & set(ids)
        seen |= set(ids)
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', each.inline)
        assert {a or b for a, b in used} <= set(ids)


def test_the_same_picture_is_the_same_file() -> None:
    """Guards against dates and random names, which would change committed files for nothing."""

    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [3, 4], label="a line")

    first, second = (plotting.picture("name", "heading", "title", draw) for _ in range(2))
    assert (first.svg, first.png) == (second.svg, second.png)


def test_one_in_a_page_takes_the_colour_of_its_text() -> None:
    picture = plotting.picture("name", "heading", "title", lambda axes: None)
    assert "currentColor" in picture.inline
    assert "currentColor" not in picture.svg
    assert "width=" not in picture.inline.split(">")[0]
    ET.fromstring(picture.svg)


def test_bands_without_an_interval_are_lines() -> None:
    def draw(axes: Axes) -> None:
        plotting.band(axes, [1, 2], [Estimate(1.0), Estimate(2.0)], "few prompts", plotting.BLUE)
        plotting.log2_axis(axes, "x", [1, 2])
        plotting.log_axis_up(axes, "y")

    assert "few prompts" in plotting.picture("name", "heading", "title", draw).svg


def test_differences_of_nothing_look_like_nothing() -> None:
    """Guards against an axis that reads 1e-6 + 98.9 and fills the chart with the last digits."""
    drawn: list[Axes] = []

    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [98.9357, 98.935709])
        plotting.least_span_up(axes, 10)
        drawn.append(axes)

    svg = plotting.picture("name", "heading", "title", draw).svg
    (axes,) = drawn
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(10)
    assert low < 98.9357 < 98.935709 < high
    assert ">98<" in svg


def test_numbers_of_an_axis_have_no_offset() -> None:
    drawn: list[Axes] = []

    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [98.9357, 98.935709])
        drawn.append(axes)

    plotting.picture("name", "heading", "title", draw)
    assert drawn[0].yaxis.get_major_formatter().get_offset() == ""


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (16, "16"), (2048, "2048"), (16384, "16.4k"), (3e6, "3M")]
)
def test_numbers_of_axes_are_short(value: float, text: str) -> None:
    assert plotting.short(value) == text
