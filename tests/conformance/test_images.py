"""Prompts with images, on vLLM in this process and on an unmodified server.

`make conformance-images` runs both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from reward_service.reward import score
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest
from specrej.images import opened
from tests.conformance.sessions import Tokens, add, drawn, ids
from tests.conformance.subjects import metric, stock, sums, vllm
from tests.images import image, picture
from tests.programs import ROOT
from tests.reward_service.tiny import load
from tests.servers.starting import vllm_server
from tests.vision import CONTEXT, IMAGE_TOKENS, SIDE, save_vision_classifier, save_vision_model

_HAS_VLLM = importlib.util.find_spec("vllm") is not None
_VISION = ROOT / ".vision"
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*not an async function"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not _VISION.exists(), reason="no .vision: make conformance-images"),
]

_RED, _BLUE = (image(size=(SIDE, SIDE), colour=colour) for colour in ((250, 9, 9), (9, 9, 250)))
_TEXTS = ("Look at this, then at that one: ", " and ", ", and say which one you like better.")
_SAMPLING = c.Sampling(max_tokens=24, seed=3, ignore_eos=True)
_GREEDY = c.Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
_BLOCK = 32
_RESPONSES = ("The first one.", "", "The second one, as it is blue.")


def prompt_of(*images: c.Image) -> c.Prompt:
    """The texts with images between them."""
    parts: list[c.TextPart | c.Image] = [c.TextPart(_TEXTS[0])]
    for text, one in zip(_TEXTS[1:], images, strict=False):
        parts += [one, c.TextPart(text)]
    return c.Prompt(messages=(c.Message("user", parts=tuple(parts)),))


PROMPT = prompt_of(_RED, _BLUE)
NUM_TOKENS = len("<user></s><assistant>") - 3 + sum(map(len, _TEXTS)) + 2 * IMAGE_TOKENS


class Seeing(NamedTuple):
    """A generator that takes images; `counter` returns a counter of vLLM's."""

    generator: c.Generator
    counter: Callable[[str], Awaitable[float]]
    is_server: bool


@asynccontextmanager
async def _in_process(directory: Path) -> AsyncIterator[Seeing]:
    async with vllm(directory, context_tokens=CONTEXT, kv_slots=4096) as subject:

        async def counter(name: str) -> float:
            return metric(name)

        yield Seeing(subject.generator, counter, is_server=False)


@asynccontextmanager
async def _at_server(directory: Path) -> AsyncIterator[Seeing]:
    limits = ("--max-model-len", f"{CONTEXT}", "--limit-mm-per-prompt", '{"video": 0}')
    async with vllm_server(*limits, model=directory, PYTHONPATH=f"{_VISION}") as url:
        about: dict[str, Any] = {"form": c.CandidateForm.ROUNDS}
        async with stock(url, f"{directory}", **about) as subject:
            yield Seeing(subject.generator, partial(sums, url), is_server=True)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=["process"] if _HAS_VLLM else ["server"]
)
async def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Seeing]:
    directory = save_vision_model(tmp_path_factory.mktemp("vision"))
    async with (_in_process if _HAS_VLLM else _at_server)(directory) as made:
        yield made


async def first_of(seeing: Seeing, *images: c.Image) -> tuple[Any, ...]:
    """The tokens of the only candidate."""
    spec = c.SessionSpec(prompt_of(*images), 1, _GREEDY, 8)
    return (await drawn(seeing.generator, spec))[0]


async def test_it_says_that_it_takes_images(seeing: Seeing) -> None:
    described = await seeing.generator.describe()
    assert described.takes_images
    assert "images in prompts" in described.form_summary


async def test_eight_candidates_with_cuts_and_forks(seeing: Seeing) -> None:
    """Survivors have the tokens of a session without cuts where rounds begin at equal tokens."""

    async def run(keep: list[int], forks: dict[int, int]) -> tuple[Tokens, list[int]]:
        tokens: Tokens = {}
        async with seeing.generator.open(c.SessionSpec(PROMPT, 8, _SAMPLING, 8)) as session:
            add(tokens, await session.extend(8))
            refused = (await session.prune(keep, forks)).refused
            tokens |= {number: tokens[forks[number]] for number in forks if number not in refused}
            ended = await session.extend(16)
            add(tokens, ended)
            await session.prune(ids(ended.candidates)[:2])
            last = await session.extend(24)
            assert session.prompt_tokens == NUM_TOKENS
            return add(tokens, last), ids(last.candidates)

    cut, last = await run([1, 3, 6], {8: 3})
    kept, _ = await run([*range(8)], {})
    assert len(cut) == (8 if seeing.is_server else 9)  # streams are not forked
    assert last == [1, 3]
    assert all(len(cut[number]) == 24 for number in last)
    for number in (1, 3, 6):
        assert cut[number][:16] == kept[number][:16]
    assert len({tokens[:8] for tokens in kept.values()}) == 8
    if 8 in cut:
        assert cut[8][:8] == cut[3][:8]
        assert cut[8] != cut[3][:16]


async def test_images_and_their_order_change_the_tokens(seeing: Seeing) -> None:
    shown = [(_RED, _BLUE), (_BLUE, _RED), (_RED, _RED), (_RED,)]
    greedy = [await first_of(seeing, *images) for images in shown]
    assert len({*greedy}) == 4
    assert await first_of(seeing, *shown[0]) == greedy[0]


async def test_the_prompt_is_computed_once_for_all_candidates(seeing: Seeing) -> None:
    """Its keys and values, in which images are tokens, and what the processor makes of images."""
    green = image(size=(SIDE, SIDE), colour=(9, 250, 9))
    names = (
        "vllm:prompt_tokens",
        "vllm:prefix_cache_hits",
        "vllm:mm_cache_hits",
        "vllm:mm_cache_queries",
    )
    before = {name: await seeing.counter(f"{name}_total") for name in names}
    await drawn(seeing.generator, c.SessionSpec(prompt_of(green, _RED), 8, _SAMPLING, 8))
    tokens, reused, hits, queries = [
        await seeing.counter(f"{name}_total") - before[name] for name in names
    ]
    assert tokens == 8 * NUM_TOKENS
    assert reused >= 7 * (NUM_TOKENS // _BLOCK * _BLOCK)
    assert queries - hits == 1  # of the image that no request had before


async def test_refuses_damaged_images(seeing: Seeing) -> None:
    with pytest.raises(InvalidRequest):
        await first_of(seeing, _RED, c.Image(picture()[:-30]))
    assert await first_of(seeing, _RED, _BLUE)


@pytest.mark.skipif(not _HAS_VLLM, reason="needs vLLM in this process")
def test_a_classifier_reads_images(tmp_path: Path) -> None:
    """As transformers computes the model, in batches, and of long responses the end."""
    directory, how = save_vision_classifier(tmp_path), {"enforce_eager": True}
    reward = load("classifier", directory, images="read", engine="vllm", vllm_options=how)
    try:
        for prompt in (PROMPT, prompt_of(_BLUE, _RED), prompt_of(_RED), prompt_of()):
            values = score(reward, prompt, [*_RESPONSES, _RESPONSES[0]]).values
            expected = [_by_transformers(directory, prompt, text) for text in _RESPONSES]
            assert values == pytest.approx([*expected, expected[0]], abs=2e-3)
            assert len({*expected}) == len(expected)
        room = CONTEXT - NUM_TOKENS - 1  # of a response, with the end of its turn
        cut, long = score(reward, PROMPT, ["x" * room, "y" + "x" * room]).values
        assert cut == long
        with pytest.raises(InvalidRequest, match="cut off"):
            score(reward, prompt_of(c.Image(picture()[:-30])), ["a"])
        many = c.Message("user", parts=(c.TextPart("x" * 430), *[_RED] * 16))
        with pytest.raises(InvalidRequest, match="takes 512"):
            score(reward, c.Prompt((many,)), ["a"])
    finally:
        reward.close()


def _by_transformers(directory: Path, prompt: c.Prompt, response: str) -> float:
    """The head's output at the last token."""
    processor = AutoProcessor.from_pretrained(directory)
    turns = [{"role": "user", "content": prompt.messages[0].chat_content}]
    turns += [{"role": "assistant", "content": response}]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False)
    pictures = [opened(one, "prompt") for one in prompt.images.values()] or None
    inputs = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
    model = Qwen2VLForConditionalGeneration.from_pretrained(directory)
    with torch.inference_mode():
        hidden = model.model(**inputs).last_hidden_state[0, -1]
    head = load_file(directory / "model.safetensors")["language_model.score.weight"]
    return float(head[0] @ hidden)
