"""The world itself: a request through its gateway and through its port have one answer."""

from __future__ import annotations

from openai import AsyncOpenAI

from tests.world import world


async def test_the_gateway_of_a_world_serves_its_models() -> None:
    async with (
        world(gateway=True) as w,
        AsyncOpenAI(base_url=f"{w.gateway_url}/v1", api_key="none", max_retries=0) as client,
    ):
        models = await client.models.list()
        model = (await w.generator.describe()).model
    assert model in {each.id for each in models.data}
