"""All pictures of one analysis, by study."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.figures import (
    anatomy,
    best_of_n,
    correlation,
    failures,
    improvement,
    matched,
    perplexity,
    sweep,
)
from experiments.figures.plotting import Picture
from experiments.studies.analysis import Analysis


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures of each study; none where it could not be made."""

    matched: tuple[Picture, ...]
    best_of_n: tuple[Picture, ...]
    sweep: tuple[Picture, ...]
    correlation: tuple[Picture, ...]
    perplexity: tuple[Picture, ...]
    improvement: tuple[Picture, ...]
    anatomy: tuple[Picture, ...]
    failures: tuple[Picture, ...]

    def all(self) -> tuple[Picture, ...]:
        """In the order of the studies."""
        return (
            *(*self.matched, *self.best_of_n, *self.sweep, *self.correlation),
            *(*self.perplexity, *self.improvement, *self.anatomy, *self.failures),
        )


def draw(analysis: Analysis) -> Gallery:
    """Every picture, named by collection and reward."""
    name = analysis.slug
    return Gallery(
        matched.draw(analysis.matched, name),
        best_of_n.draw(analysis.best_of_n, name),
        sweep.draw(analysis.sweep, name),
        correlation.draw(analysis.correlation, name),
        perplexity.draw(analysis.perplexity, name) if analysis.perplexity else (),
        improvement.draw(analysis.improvement, name),
        anatomy.draw(analysis.anatomy, name) if analysis.anatomy else (),
        failures.draw(analysis.failures, name),
    )
