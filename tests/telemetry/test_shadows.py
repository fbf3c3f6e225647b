"""What shadows tell, as a Prometheus endpoint of real processes says it."""

from __future__ import annotations

import asyncio

from specrej.contracts import Schedule
from specrej.telemetry import names
from specrej.telemetry.names import Metric
from tests.telemetry.observed import Observed, Values, observed, prometheus_name, request, until

SETTINGS = {
    "SPECREJ_ORCHESTRATOR_SHADOW_SHARE": "1",
    "SPECREJ_ORCHESTRATOR_SHADOW_REGRET": "0.9",
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
}
REQUESTS = 16


async def ask(service: Observed, seed: int) -> None:
    await service.stub.Generate(request(seed=seed, n=8, schedule=Schedule(first=4)))


async def settled(service: Observed, requests: int) -> Values:
    """Once the shadows of so many requests have ended or were given up."""
    values: list[Values] = []

    async def is_over() -> bool:
        values.append(await service.scrape("orchestrator"))
        done = ("specrej_shadow_requests_total", "specrej_shadow_given_up_total")
        return sum(values[-1].sum(name) for name in done) == requests

    await until(is_over)
    return values[-1]


async def test_every_metric_of_shadows_is_emitted_and_their_tokens_add_up() -> None:
    """Guards against names that dashboards use and nothing has, and tokens that nobody counts."""
    async with observed(SETTINGS) as service:
        for seed in range(REQUESTS):
            await ask(service, seed)
            await settled(service, seed + 1)
        await asyncio.gather(*(ask(service, seed) for seed in range(3)))
        values = await settled(service, REQUESTS + 3)
        emitted = {name for name, _ in values.samples}
        for metric in vars(names).values():
            if isinstance(metric, Metric) and metric.name.startswith("specrej.shadow."):
                total = "_total" if metric.kind == "counter" else ""
                assert prometheus_name(metric) + total in emitted, metric.name
        labels = {"schedule": "geometric 4x2", "reward": "toy"}
        assert values.sum("specrej_shadow_requests_total", **labels) >= REQUESTS
        assert values.sum("specrej_shadow_given_up_total", reason="busy", **labels) >= 1
        for token in ("4", "8"):
            name = "specrej_shadow_correlation"
            assert abs(values.sum(name, decision_token=token, **labels)) <= 1
        made = (await service.scrape("generator")).sum(
            "specrej_engine_tokens_total", kind="generated"
        )
        told = values.sum("specrej_tokens_total", kind="generated")
        assert made == told + values.sum("specrej_shadow_tokens_total") > 0
