"""Which settings the studies replay: alpha 0.1 to 0.9, three kinds of schedules, some N."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.runs import MEMORY, Plan
from experiments.trajectories import Trajectories
from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Schedule

ALPHAS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
DOUBLING = Schedule("geometric", first=16, factor=2.0)  # the service's own default
_FIRSTS = (8, 16, 32)
_EXPLICIT = (16, 64, 256)
_MEMORY_TOKENS = 16
_FEWEST = 16  # with fewer answers there is little to reject


def plans(
    prompts: Sequence[Trajectories], reward: str, alphas: Sequence[float] = ALPHAS
) -> tuple[Plan, ...]:
    """All whose decision tokens lie where prefixes were scored; the largest N first.

    Memory that a candidate alone would not fit is left out.
    """
    max_tokens = min(each.max_tokens for each in prompts)
    longest = max(each.max_tokens for each in prompts)
    return tuple(
        plan
        for n in numbers(prompts)
        for schedule, memory_tokens in _schedules(max_tokens)
        if not memory_tokens or n * memory_tokens >= longest
        if _is_scored(prompts, reward, Plan(n, 0.5, schedule, memory_tokens))
        for plan in (Plan(n, alpha, schedule, memory_tokens) for alpha in alphas)
    )


def numbers(prompts: Sequence[Trajectories]) -> tuple[int, ...]:
    """As many answers as there are, and three halvings of that."""
    most = min(each.n for each in prompts)
    halvings = [most // 2**i for i in range(4)]
    return tuple(n for n in halvings if n >= _FEWEST) or (most,)


def base_n(prompts: Sequence[Trajectories]) -> int:
    """Of the improvement score: an eighth of the answers there are."""
    return max(1, min(each.n for each in prompts) // 8)


def _schedules(max_tokens: int) -> list[tuple[Schedule, int]]:
    geometric = [
        (Schedule("geometric", first=first, factor=2.0), 0)
        for first in _FIRSTS
        if first < max_tokens
    ]
    tokens = tuple(token for token in _EXPLICIT if token < max_tokens)
    explicit = [(Schedule("tokens", tokens), 0)] if tokens else []
    memory = [(MEMORY, _MEMORY_TOKENS)] if max_tokens > _MEMORY_TOKENS else []
    return [*geometric, *explicit, *memory]


def _is_scored(prompts: Sequence[Trajectories], reward: str, plan: Plan) -> bool:
    """Full slots end a round at the last position of the grid before, so the first one counts."""
    if reward == LIKELIHOOD:
        return True
    needed = set(plan.planned(min(each.max_tokens for each in prompts)) or ())
    return all(
        needed <= {int(position) for position in each.positions}
        and (not plan.memory_tokens or int(each.positions[0]) <= plan.memory_tokens)
        for each in prompts
    )
