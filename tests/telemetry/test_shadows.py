"""Metrics of shadows, from the Prometheus endpoint of real processes."""

from __future__ import annotations

import asyncio

from specrej.contracts import Schedule
from tests.endpoints import Scrape
from tests.serving import until
from tests.telemetry.observed import observed, request

SETTINGS = {
    "SPECREJ_ORCHESTRATOR_SHADOW_SHARE": "1",
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
}
REQUESTS = 6


async def test_tokens_of_shadows_and_answers_add_up() -> None:
    """Guards against uncounted tokens, and metrics without the labels of their request."""
    values: list[Scrape] = []
    async with observed(SETTINGS) as service:

        async def has_ended() -> bool:
            values.append(await service.scrape("orchestrator"))
            done = ("specrej_shadow_requests_total", "specrej_shadow_given_up_total")
            return sum(values[-1].sum(name) for name in done) == REQUESTS

        messages = [request(seed=seed, n=8, schedule=Schedule(first=4)) for seed in range(REQUESTS)]
        await asyncio.gather(*(service.stub.Generate(message) for message in messages))
        await until(has_ended)
        labels = {"schedule": "geometric 4x2", "reward": "toy"}
        assert values[-1].sum("specrej_shadow_requests_total", **labels) >= 1
        assert values[-1].sum("specrej_shadow_given_up_total", reason="busy", **labels) >= 1
        # Of a token at which all scores are equal there is none.
        found = values[-1].matching("specrej_shadow_correlation", **labels)
        assert found and {dict(series.labels)["decision_token"] for series in found} <= {"4", "8"}
        assert all(-1 <= correlation <= 1 for correlation in found.values())
        made = (await service.scrape("generator")).sum(
            "specrej_engine_tokens_total", kind="generated"
        )
        of_answers = values[-1].sum("specrej_tokens_total", kind="generated")
        assert made == of_answers + values[-1].sum("specrej_shadow_tokens_total") > of_answers
