"""The report as one HTML file, from the templates beside this module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.figures.charts import Pictures
from experiments.figures.plotting import Picture
from experiments.replay import decision_tokens
from experiments.studies.analysis import Analysis
from experiments.studies.matched import EXPECTED, expected_saving
from experiments.studies.tables import Table, shown
from specrej.contracts import Schedule

_TEMPLATES = Path(__file__).with_name("templates")
_LENGTHS = (128, 512, 1024, 2048)  # for which the bound is given
_WIDE = 3  # pictures that fill a row of their own


def page(
    analyses: Sequence[Analysis],
    pictures: Sequence[Pictures],
    summaries: Sequence[Table],
    notes: Mapping[str, str],
) -> str:
    """The document. `pictures` are those of each analysis."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.filters["slug"] = lambda text: text.lower().replace(" ", "-").replace(",", "")
    environment.filters["inline"] = _inline
    environment.filters["percent"] = lambda share, digits=0: f"{share:.{digits}%}"
    environment.tests["finite"] = math.isfinite
    environment.tests["nan"] = math.isnan
    environment.globals["rows_of_pictures"] = rows_of_pictures
    return environment.get_template("page.html.jinja").render(
        reports=list(zip(analyses, pictures, strict=True)),
        summaries=summaries,
        notes=notes,
        expected=EXPECTED,
        bounds=[(length, _bound(length)) for length in _LENGTHS],
    )


def rows_of_pictures(
    reports: Sequence[tuple[Analysis, Pictures]], study: str
) -> list[list[tuple[Analysis, Picture]]]:
    """The pictures of a study, by rows of the page.

    A row per analysis where one has three pictures or more; otherwise one row, in which the same
    pictures of all analyses are neighbours.
    """
    rows = [[(analysis, picture) for picture in drawn[study]] for analysis, drawn in reports]
    if max(map(len, rows)) >= _WIDE:
        return rows
    columns = itertools.zip_longest(*rows)
    return [[cell for column in columns for cell in column if cell]]


def _inline(picture: Picture) -> Markup:
    """The SVG with its title as a label for screen readers."""
    return Markup(picture.inline.replace("<svg", f'<svg aria-label="{escape(picture.title)}"', 1))


def _bound(max_tokens: int) -> float:
    """The saving for answers of `max_tokens`, with alpha 0.5 and cuts at 16, 32, 64, ..."""
    cuts = decision_tokens(Schedule(first=16), max_tokens)
    return expected_saving(np.full(1, max_tokens), 0.5, cuts)
