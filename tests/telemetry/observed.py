"""All services as processes that export to a real collector, and what their clients see."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from deploy.local.stack import Stack
from tests.collector import Collector, collecting
from tests.faults.world import SERVICES
from tests.toys import TOYS

GENERATE = "specrej.v1.OrchestratorService/Generate"
GENERATE_STREAM = "specrej.v1.OrchestratorService/GenerateStream"
SESSION = "specrej.backend.v1.GeneratorService/Session"
SCORE_SESSION = "specrej.backend.v1.RewardService/ScoreSession"


@dataclass(frozen=True, slots=True)
class Observed:
    """A running service and its collector."""

    stack: Stack
    collector: Collector

    def log_of(self, service: str) -> list[dict[str, Any]]:
        """The JSON lines of a service so far."""
        text = (self.stack.log_dir / f"{service}.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@asynccontextmanager
async def observed(
    environment: Mapping[str, str] | None = None, *, on_toys: bool = True, gateway: bool = False
) -> AsyncIterator[Observed]:
    """A service of real processes that exports to a collector at short intervals."""
    async with collecting() as collector:
        variables = {
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "SPECREJ_ORCHESTRATOR_LOG_FORMAT": "json",
            # The default of a quarter of a second is short on a busy machine.
            "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
            **{
                f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": collector.endpoint
                for name in (*SERVICES, "gateway")
            },
            **(TOYS if on_toys else {}),
            **(environment or {}),
        }
        async with Stack(environment=variables, gateway=gateway) as stack:
            yield Observed(stack, collector)
