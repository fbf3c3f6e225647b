"""Sessions, rounds and slots of the generator on vLLM, without a vLLM: its engine is a double.

What the double cannot show, tests/conformance does on the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.local import ModelCard
from generator_service.settings import GeneratorSettings
from generator_service.vllm_generator import Blocks, VLLMGenerator, VLLMSession, fingerprint_of
from specrej.contracts import FinishReason, Prompt, RoundEnd, Sampling
from specrej.errors import (
    InternalError,
    InvalidRequest,
    OutOfOrder,
    Overloaded,
    SessionExpired,
)

EOS = 0
ENDLESS = Sampling(max_tokens=40, ignore_eos=True)
PROMPT = Prompt(text="a b c d e")
BLOCK = 4


def test_what_vllm_is_told_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Guards against two that speak differently, and take each other's place."""
    (tmp_path / "config.json").write_text("{}")

    def of(**options: object) -> str:
        settings = GeneratorSettings(engine="vllm", model=str(tmp_path), vllm_options=options)
        return fingerprint_of(settings, "bfloat16", "1")

    assert of(quantization="fp8") == of(quantization="fp8")
    assert len({of(), of(quantization="fp8"), of(kv_cache_dtype="fp8")}) == 3


class Words:
    """Stands for the tokenizer: a word is a token."""

    def encode(self, prompt: Prompt) -> list[int]:
        return [len(word) for word in prompt.text.split()]

    def answer(self, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> str:
        return " ".join(map(str, token_ids))

    def stops(self, stop: Sequence[str]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Written:
    """A token of the double."""

    id: int
    logprob: float = -0.5


@dataclass(eq=False, slots=True)
class DoubleWriter:
    """Writes its candidate's id and the token's number; counts what it would hold in vLLM."""

    engine: DoubleEngine
    candidate: int
    prompt_tokens: int
    written: int = 0

    async def write(self, count: int) -> AsyncGenerator[Written, None]:
        await self.engine.gate.wait()
        if self.candidate == self.engine.failing:
            raise InternalError("the generator's step failed")
        self.engine.hold(self, count)
        for _ in range(count):
            self.written += 1
            ends = self.written == self.engine.ends.get(self.candidate)
            yield Written(EOS if ends else 1000 * self.candidate + self.written)
            if ends:
                return


@dataclass(eq=False, slots=True)
class DoubleEngine:
    """vLLM's place; `ends`: after how many tokens a candidate ends by itself."""

    capacity_slots: int = 400
    max_rows: int = 16
    ends: dict[int, int] = field(default_factory=dict)
    failing: int | None = None
    block_tokens: int = BLOCK
    eos_ids: frozenset[int] = frozenset({EOS})
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[DoubleWriter, int] = field(default_factory=dict)
    most_held: int = 0
    num_growing: int = 0
    closed: bool = False

    def writer(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        candidate: int,
        *,
        salt: str = "",
        watched: bool = False,
    ) -> DoubleWriter:
        return DoubleWriter(self, candidate, len(prompt_ids))

    def hold(self, writer: DoubleWriter, count: int) -> None:
        """Blocks of its own for what is stored once it has written so many more tokens."""
        shared = (writer.prompt_tokens - 1) // BLOCK * BLOCK
        stored = writer.prompt_tokens - shared + writer.written + count - 1
        self.held[writer] = -(-stored // BLOCK) * BLOCK
        self.most_held = max(self.most_held, sum(self.held.values()) + shared)
        assert len(self.held) <= self.max_rows

    async def abort(self, writers: Sequence[DoubleWriter]) -> None:
        for writer in writers:
            self.held.pop(writer, None)

    def growing(self, *, more: int) -> None:
        self.num_growing += more

    def heartbeat_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True


def make(engine: DoubleEngine, **options: int) -> VLLMGenerator:
    engine.gate.set()
    card = ModelCard("double", "f", 256, engine.max_rows, 10_000, 1, "none")
    return VLLMGenerator(engine, Words(), card, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def opened(
    generator: VLLMGenerator, n: int, sampling: Sampling = ENDLESS, first: int = 4
) -> AsyncIterator[VLLMSession]:
    """A session; afterwards nothing of it is left."""
    async with generator.open(PROMPT, n, sampling, first) as session:
        yield session


def is_idle(generator: VLLMGenerator) -> bool:
    engine = generator.engine
    assert isinstance(engine, DoubleEngine)
    generator.ledger.check_integrity()
    load = generator.load()
    return not (
        load.sessions or load.waiting or load.slots.owned or engine.held or engine.num_growing
    )


@settings(deadline=None)
@given(
    size=st.integers(1, 64),
    prompt_tokens=st.integers(1, 300),
    tokens=st.integers(1, 500),
    room=st.integers(0, 1000),
)
def test_reach_is_the_most_that_fits(size: int, prompt_tokens: int, tokens: int, room: int) -> None:
    blocks = Blocks(size, prompt_tokens)
    assert 0 <= blocks.shared < prompt_tokens
    assert blocks.own(tokens) % size == 0
    assert blocks.shared + blocks.own(tokens) >= prompt_tokens + tokens - 1
    reach = blocks.reach(room)
    assert blocks.own(reach) <= room
    assert blocks.own(reach + 1) > room
    assert blocks.reach(blocks.own(tokens)) >= tokens


@settings(deadline=None)
@given(
    n=st.integers(1, 16),
    capacity=st.integers(60, 500),
    max_tokens=st.integers(1, 60),
    ends=st.dictionaries(st.integers(0, 15), st.integers(1, 60)),
    cuts=st.lists(st.integers(1, 60), max_size=6),
)
def test_books_never_fall_short_of_what_is_held(
    n: int, capacity: int, max_tokens: int, ends: dict[int, int], cuts: list[int]
) -> None:
    """Or vLLM would have to take something back. Every round makes progress, or says why not."""

    async def run() -> None:
        engine = DoubleEngine(capacity // BLOCK * BLOCK, ends=ends)
        generator = make(engine)
        sampling = Sampling(max_tokens=max_tokens)
        finished: list[int] = []
        try:
            async with opened(generator, n, sampling) as session:
                for until in [*sorted(cuts), *[max_tokens] * (n + 1)]:
                    ended = await session.extend(until)
                    assert ended.slots.owned >= sum(engine.held.values())
                    live = [c.id for c in ended.candidates if c.finish is None]
                    finished += [c.id for c in ended.candidates if c.finish]
                    if ended.ended_by is RoundEnd.SLOTS_FULL:
                        live = live[: max(1, len(live) // 2)]
                    await session.prune(live)
                assert not session.live, "it did not get to an end"
            assert len(set(finished)) == len(finished)
        except InvalidRequest as error:
            assert error.reason == "SLOTS_EXCEEDED"
        assert engine.most_held <= engine.capacity_slots
        assert is_idle(generator)

    asyncio.run(run())


async def test_a_finished_candidate_makes_room_within_the_round() -> None:
    """Room for ten tokens of both; the other goes on in what the first has left."""
    engine = DoubleEngine(60, ends={0: 3})
    generator = make(engine)
    async with opened(generator, 2, Sampling(max_tokens=40)) as session:
        ended = await session.extend(40)
        assert ended.ended_by is RoundEnd.ALL_FINISHED
        assert [(c.num_tokens, c.finish) for c in ended.candidates] == [
            (3, FinishReason.STOP),
            (40, FinishReason.LENGTH),
        ]
    assert is_idle(generator)


async def test_one_that_does_not_fit_waits_its_turn() -> None:
    """First come, first served, also for smaller ones that would fit; who gives up is forgotten."""
    generator = make(DoubleEngine(400), max_waiting=2)
    order: list[str] = []

    async def visit(name: str, n: int) -> None:
        async with opened(generator, n, first=40):
            order.append(name)

    async with opened(generator, 8, first=40):
        large = asyncio.create_task(visit("large", 8))
        gone = asyncio.create_task(visit("gone", 8))
        while generator.load().waiting < 2:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            async with opened(generator, 1):
                pass
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        small = asyncio.create_task(visit("small", 1))
        while generator.load().waiting < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    assert is_idle(generator)


async def test_more_requests_than_vllm_takes_are_never_open() -> None:
    """Those that wait between two rounds count: others would never be scheduled beside them."""
    engine = DoubleEngine(4000, max_rows=10)
    generator = make(engine)

    async def visit() -> None:
        async with opened(generator, 4) as session:
            await session.extend(4)

    with pytest.raises(InvalidRequest, match="at most 10"):
        async with opened(generator, 11):
            pass
    async with opened(generator, 7) as session:
        await session.extend(4)
        async with opened(generator, 0) as filling:
            assert filling.n == 3
            waiting = asyncio.create_task(visit())
            await filling.extend(4)
            assert generator.load().waiting == 1
            await session.prune([0, 1, 2])
            await waiting
    assert is_idle(generator)


async def test_a_failure_ends_its_session_and_no_other() -> None:
    engine = DoubleEngine(failing=1)
    generator = make(engine)
    async with opened(generator, 1) as other:
        async with opened(generator, 3) as session:
            with pytest.raises(InternalError):
                await session.extend(8)
            with pytest.raises(SessionExpired):
                await session.extend(8)
        assert (await other.extend(8)).num_tokens == 8
    assert is_idle(generator)


async def test_one_command_at_a_time() -> None:
    engine = DoubleEngine()
    generator = make(engine)
    async with opened(generator, 3) as session:
        engine.gate.clear()
        growing = asyncio.create_task(session.extend(8))
        while not engine.num_growing:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0)
        for command in (session.extend(8), session.prune([0])):
            with pytest.raises(OutOfOrder):
                await command
        engine.gate.set()
        assert (await growing).num_tokens == 8
    with pytest.raises(SessionExpired):
        await session.extend(9)
    assert is_idle(generator)


async def test_cancelled_in_a_round() -> None:
    engine = DoubleEngine()
    generator = make(engine)
    engine.gate.clear()

    async def run() -> None:
        async with opened(generator, 3) as session:
            await session.extend(8)

    running = asyncio.create_task(run())
    while not engine.num_growing:  # noqa: ASYNC110  # nobody announces it
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_idle(generator)


async def test_warm_up_and_end() -> None:
    engine = DoubleEngine()
    generator = make(engine)
    await generator.warm_up()
    assert is_idle(generator)
    assert (await generator.describe()).slots.capacity == 400
    generator.close()
    assert engine.closed
