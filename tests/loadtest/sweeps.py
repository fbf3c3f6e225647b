"""A sweep that never ran: requests with plausible figures, put together like real ones."""

from __future__ import annotations

import random
from functools import cache

from loadtest.sweep.driving import GAVE_UP, SLOTS
from loadtest.sweep.journal import Kept, Line, Request, RoundSeen
from loadtest.sweep.plan import Block, Condition, Costs, plan
from loadtest.sweep.results import Results, collate
from loadtest.sweep.settings import ALGORITHMS, Settings
from specrej.contracts import Algorithm

SETTINGS = Settings(prompts=("Why?", "How?", "<b>Who?</b>"), minutes=60)
COSTS = Costs(
    {
        Algorithm.SPECULATIVE_REJECTION: {1: 1.2, 16: 1.6, 64: 4.0},
        Algorithm.BEST_OF_N: {1: 1.0, 16: 2.2, 64: 8.0},
    }
)


@cache
def made_up(settings: Settings = SETTINGS) -> Results:
    """All of a sweep."""
    blocks = plan(settings, COSTS)
    requests = {block.key: _requests(settings, block) for block in blocks}
    ends: dict[str, Line] = {
        key: {"block": key, "size": len(asked), "wall_s": sum(r.seconds for r in asked), "late": 0}
        for key, asked in requests.items()
    }
    requests[SLOTS], ends[SLOTS] = _watched(), {"block": SLOTS}
    head: Line = {
        "settings": settings.to_json(),
        "date": "2026-01-02 03:04 UTC",
        "machine": {"processor": "an abacus", "cores": "2"},
        "service": {"model": "toy", "reward": "toy"},
        "command": "python -m loadtest.sweep",
    }
    return collate(Kept(head, ends, requests), blocks)


def request(
    block: Block, seconds: float, *, index: int = 0, code: str = "OK", reward: float = 0.5
) -> Request:
    """One of a block."""
    tokens = block.n * (80 if block.algorithm is Algorithm.BEST_OF_N else 40)
    rounds = (RoundSeen(seconds / 3, 16, block.n, 16 * block.n + 9, 8 * block.n, 10_000),)
    return Request(
        block=block.key,
        n=block.n,
        prompt=index % 3,
        seed=index,
        due_s=float(index),
        late_s=0.0,
        code=code,
        seconds=seconds,
        first_round_s=seconds / 3,
        prompt_tokens=9,
        tokens=tokens,
        reward=reward,
        complete=index % 2 == 0,
        answer_tokens=40,
        score_s=seconds / 10,
        rounds=(*rounds, RoundSeen(seconds, 64, 0, 9, 0, 10_000)),
    )


def _requests(settings: Settings, block: Block) -> list[Request]:
    drawn = random.Random(block.key)
    slower = 1.0 if block.condition is Condition.ALONE else 2.5
    made = []
    for index in range(block.num_requests):
        seconds = slower * COSTS.of(block.algorithm, block.n) * drawn.uniform(0.9, 1.2)
        gave_up = block.condition is Condition.STEADY and seconds > settings.patience_s
        reward = 0.4 + 0.05 * block.n.bit_length() * drawn.uniform(0.8, 1.2)
        made.append(
            request(
                block,
                min(seconds, settings.patience_s) if gave_up else seconds,
                index=index,
                code=GAVE_UP if gave_up else "OK",
                reward=reward,
            )
        )
    return made


def _watched() -> list[Request]:
    blocks = [Block(0, Condition.ALONE, algorithm, 64, 1) for algorithm in ALGORITHMS]
    return [request(block, COSTS.of(block.algorithm, 64)) for block in blocks]
