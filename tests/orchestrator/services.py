"""Names of `tests.world` that suites still import from here."""

from tests.world import (
    BOUND_S,
    Backend,
    CountedRewards,
    HeldGenerator,
    HeldReward,
    LongTexts,
    channel_to,
    dead_port,
    generator_backend,
    reward_backend,
    timeless,
)
from tests.world import World as Whole
from tests.world import world as whole

__all__ = [
    "BOUND_S",
    "Backend",
    "CountedRewards",
    "HeldGenerator",
    "HeldReward",
    "LongTexts",
    "Whole",
    "channel_to",
    "dead_port",
    "generator_backend",
    "reward_backend",
    "timeless",
    "whole",
]
