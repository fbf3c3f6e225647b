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

from specrej.contracts import Admitted as Admitted
from specrej.contracts import Algorithm as Algorithm
from specrej.contracts import AnswerParts as AnswerParts
from specrej.contracts import Branching as Branching
from specrej.contracts import CacheControl as CacheControl
from specrej.contracts import ConfidenceCut as ConfidenceCut
from specrej.contracts import Event as Event
from specrej.contracts import Finished as Finished
from specrej.contracts import FinishReason as FinishReason
from specrej.contracts import Generation as Generation
from specrej.contracts import Image as Image
from specrej.contracts import Message as Message
from specrej.contracts import Normalization as Normalization
from specrej.contracts import Progress as Progress
from specrej.contracts import Prompt as Prompt
from specrej.contracts import RankedCandidate as RankedCandidate
from specrej.contracts import RoundCompleted as RoundCompleted
from specrej.contracts import RoundTrace as RoundTrace
from specrej.contracts import Schedule as Schedule
from specrej.contracts import ServiceDescription as ServiceDescription
from specrej.contracts import StopReason as StopReason
from specrej.contracts import TextDelta as TextDelta
from specrej.contracts import TextPart as TextPart
from specrej.contracts import Timings as Timings
from specrej.contracts import Tool as Tool
from specrej.contracts import ToolCall as ToolCall
from specrej.contracts import Usage as Usage
from specrej.contracts import Vote as Vote
from specrej.contracts import WeightedReward as WeightedReward
from specrej.contracts.errors import Cancelled as Cancelled
from specrej.contracts.errors import DeadlineExceeded as DeadlineExceeded
from specrej.contracts.errors import InternalError as InternalError
from specrej.contracts.errors import InvalidRequest as InvalidRequest
from specrej.contracts.errors import NotFound as NotFound
from specrej.contracts.errors import Overloaded as Overloaded
from specrej.contracts.errors import PermissionDenied as PermissionDenied
from specrej.contracts.errors import SpecrejError as SpecrejError
from specrej.contracts.errors import Unauthenticated as Unauthenticated
from specrej.contracts.errors import Unavailable as Unavailable
from specrej.contracts.errors import Violation as Violation

if TYPE_CHECKING:
    from specrej.client import Client as Client
    from specrej.client import Retries as Retries
    from specrej.client import SyncClient as SyncClient


def __getattr__(name: str) -> object:
    if name in ("Client", "Retries", "SyncClient"):
        return getattr(importlib.import_module("specrej.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
