"""Best-of-N answers at a fraction of their cost: Speculative Rejection as a service.

    from specrej import Client

    async with Client("127.0.0.1:50050") as client:
        generation = await client.generate("Why is the sky blue?", n=32)
        print(generation.best.text)

The contract's values need the standard library alone; the clients, which need grpc, load when they
are first named, so that the engine's modules import `specrej.contracts` where there is no grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from specrej.contracts import (
    Admitted,
    Algorithm,
    Branching,
    CacheControl,
    Event,
    Finished,
    FinishReason,
    Generation,
    Message,
    Normalization,
    Progress,
    Prompt,
    RankedCandidate,
    RoundCompleted,
    RoundTrace,
    Schedule,
    ServiceDescription,
    TextDelta,
    Timings,
    Usage,
    WeightedReward,
)
from specrej.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    SpecrejError,
    Unauthenticated,
    Unavailable,
    Violation,
)

if TYPE_CHECKING:
    from specrej.client import Client, Retries, RewardClient, SyncClient

__all__ = [
    "Client",
    "Retries",
    "RewardClient",
    "SyncClient",
    # What goes in
    "Algorithm",
    "Branching",
    "CacheControl",
    "Message",
    "Normalization",
    "Prompt",
    "Schedule",
    "WeightedReward",
    # What comes out
    "Admitted",
    "Event",
    "Finished",
    "FinishReason",
    "Generation",
    "Progress",
    "RankedCandidate",
    "RoundCompleted",
    "RoundTrace",
    "ServiceDescription",
    "TextDelta",
    "Timings",
    "Usage",
    # What goes wrong
    "Cancelled",
    "DeadlineExceeded",
    "InternalError",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "SpecrejError",
    "Unauthenticated",
    "Unavailable",
    "Violation",
]


def __getattr__(name: str) -> object:
    if name in ("Client", "Retries", "RewardClient", "SyncClient"):
        return getattr(importlib.import_module("specrej.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
