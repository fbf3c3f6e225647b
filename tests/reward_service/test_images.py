"""What rewards do with the images of prompts: read them, read the texts alone, or refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from reward_service.worker import Worker
from specrej.contracts import Message, Prompt, TextPart
from specrej.contracts.errors import InvalidRequest
from tests.images import image
from tests.reward_service.endpoint import Reply, served
from tests.reward_service.test_judge import chat
from tests.reward_service.tiny import load, working

_FIRST, _SECOND = image(), image(kind="jpeg")
PROMPT = Prompt((Message("user", parts=(_FIRST, TextPart("or"), _SECOND)),))
_URLS = [{"type": "image_url", "image_url": {"url": one.data_uri}} for one in (_FIRST, _SECOND)]


def seen(prompt: Prompt, responses: Sequence[str]) -> list[float]:
    """The number of images; the first call of a worker has a prompt of its own."""
    texts = "Hello?", "Hello!", "or"
    assert prompt.images or prompt.messages in [(Message("user", text),) for text in texts]
    return [float(len(prompt.images))] * len(responses)


def worker_of(kind: str, **options: Any) -> AbstractAsyncContextManager[Worker]:
    return working(lambda: load(kind, **options))


@pytest.mark.parametrize(("images", "value"), [("read", 2.0), ("text", 0.0)])
async def test_functions_get_images_if_they_read_them(images: str, value: float) -> None:
    async with worker_of("function", function=f"{__name__}:seen", images=images) as worker:
        assert (await worker.score(PROMPT, ["a", "b"])).values == (value, value)
        assert worker.description.takes_images == (images == "read")


@pytest.mark.parametrize("kind", ["toy", "function", "http"])
async def test_rewards_may_refuse_images(kind: str) -> None:
    async with served() as endpoint:
        more = {"function": {"function": f"{__name__}:seen"}, "http": {"url": endpoint.url}}
        async with worker_of(kind, images="refuse", **more.get(kind, {})) as worker:
            assert worker.description.takes_images  # else the orchestrator would leave them out
            with pytest.raises(InvalidRequest) as refused:
                await worker.score(PROMPT, ["a"])
            paths = [one.field for one in refused.value.violations]
            assert paths == [f"prompt.messages[0].parts[{index}]" for index in (0, 2)]
            await worker.score(Prompt.from_user("Hello!"), ["a"])


def test_only_some_kinds_can_read_images() -> None:
    with pytest.raises(ValueError, match="cannot read images: must be text or refuse"):
        load("toy", images="read")


@pytest.mark.parametrize("images", ["read", "text"])
async def test_servers_are_sent_parts_in_order(images: str) -> None:
    async with served() as endpoint, worker_of("http", url=endpoint.url, images=images) as worker:
        await worker.score(PROMPT, ["abc"])
        (turn,) = endpoint.requests[-1].body["messages"]
        parts = [_URLS[0], {"type": "text", "text": "or"}, _URLS[1]]
        assert turn["content"] == (parts if images == "read" else "or")
        other = load("http", url=endpoint.url)
        assert (other.fingerprint == worker.description.fingerprint) == (images == "text")
        await other.aclose()


@pytest.mark.parametrize("images", ["read", "text"])
async def test_a_judge_is_shown_images_and_where_they_stand(images: str) -> None:
    def reply(body: Any, _: int) -> Reply:
        return Reply(chat('{"quality": 10}'))

    async with served(reply) as endpoint:
        options = {"url": endpoint.url, "model": "m", "images": images}
        async with worker_of("judge", **options) as worker:
            assert (await worker.score(PROMPT, ["abc"])).values == (1.0,)
        content = endpoint.requests[-1].body["messages"][1]["content"]
        if images == "text":
            assert "\nor\n" in content
        else:
            text, *urls = content
            assert "(image 1)or(image 2)" in text["text"]
            assert urls == _URLS
