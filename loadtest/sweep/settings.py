"""What a sweep measures: kept with its results, so that a second start goes on with the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specrej.contracts import Algorithm

ALGORITHMS = (Algorithm.SPECULATIVE_REJECTION, Algorithm.BEST_OF_N)
DEFAULT_NS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides what is sent, and when."""

    ns: tuple[int, ...] = DEFAULT_NS
    repeats: int = 3
    minutes: float = 45.0  # what all of it should take; decides how many requests there are
    max_tokens: int = 128
    alpha: float = 0.5
    rate: float = 0.5  # arrivals per second, under a fixed rate
    patience_s: float = 12.0  # an arrival's user gives up then
    slo_s: float = 10.0  # what a good answer may take
    saturating_candidates: int = 128  # users at saturation have as many candidates together
    max_users: int = 8
    timeout_s: float = 600.0  # deadline of every request, far away: a near one would hurry cuts
    prompts: tuple[str, ...] = ()
    seed: int = 1
    address: str = ""  # empty: a stack of its own, on the embedded models

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self) | {"ns": list(self.ns), "prompts": list(self.prompts)}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Settings:
        """The same again."""
        return cls(**(kept | {"ns": tuple(kept["ns"]), "prompts": tuple(kept["prompts"])}))

    def users(self, n: int) -> int:
        """How many ask at once at saturation: enough candidates to keep the processor full."""
        return max(2, min(self.max_users, -(-self.saturating_candidates // n)))
