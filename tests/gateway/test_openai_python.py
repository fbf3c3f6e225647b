"""The official Python client against the real stack on toys."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "toy"
ASK = "Name three uses of a brick."


async def test_a_chat_is_answered(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": ASK}],
        max_tokens=24,
        extra_body={"specrej": {"n": 4}},
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.model == MODEL
    assert answer.usage
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model_extra
    assert answer.model_extra["specrej"]["n"] == 4
