"""The run loop and its policy: rounds, schedules, rejection, composition of rewards."""

from orchestrator.loop.composition import (
    LIKELIHOOD,
    Composite,
    Verdict,
    check_composites,
    check_expansion,
    expanded,
)
from orchestrator.loop.progress import WithinRounds
from orchestrator.loop.rejection import num_kept, rank
from orchestrator.loop.run import first_round_tokens, run
from orchestrator.loop.schedule import most_rounds
from orchestrator.loop.scoring import LikelihoodScorer, RequestScorer, fingerprint_of, judged

__all__ = [
    "LIKELIHOOD",
    "Composite",
    "LikelihoodScorer",
    "RequestScorer",
    "Verdict",
    "WithinRounds",
    "check_composites",
    "check_expansion",
    "expanded",
    "fingerprint_of",
    "first_round_tokens",
    "judged",
    "most_rounds",
    "num_kept",
    "rank",
    "run",
]
