"""Sessions, rounds and slots of the generator on vLLM, on a double of its engine.

tests/conformance tests it on the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from generator_service.admission import Blocks
from generator_service.engine.commands import OpenCommand
from generator_service.settings import GeneratorSettings
from generator_service.stock.vllm_generator import VLLMGenerator, VLLMSession, fingerprint_of
from specrej.contracts import (
    GeneratorDescription,
    Prompt,
    RoundEnd,
    Sampling,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import InternalError, InvalidRequest, SessionExpired
from tests.serving import until

EOS = 0
ENDLESS = Sampling(max_tokens=40, ignore_eos=True)
PROMPT = Prompt(text="a b c d e")
BLOCK = 4


def test_vllm_options_are_in_the_fingerprint(tmp_path: Path) -> None:
    """Guards against generators with different tokens that replace each other."""
    (tmp_path / "config.json").write_text("{}")

    def of(**options: object) -> str:
        settings = GeneratorSettings(engine="vllm", model=str(tmp_path), vllm_options=options)
        return fingerprint_of(settings, "bfloat16", "1")

    assert of(quantization="fp8") == of(quantization="fp8")
    assert len({of(), of(quantization="fp8"), of(kv_cache_dtype="fp8")}) == 3
    # Generators of several nodes differ in the addresses of their nodes.
    assert of(nnodes=2, master_addr="a", master_port=1) == of(
        nnodes=2, master_addr="b", node_rank=0
    )


def test_speculative_decoding_is_refused() -> None:
    """Guards against tokens that depend on what a draft model proposes."""
    with pytest.raises(ValidationError, match="speculative_config cannot be used"):
        GeneratorSettings(vllm_options={"speculative_config": {"model": "ngram"}})


class Words:
    """A tokenizer double: a word is a token."""

    def encode(self, prompt: Prompt) -> list[int]:
        return [len(word) for word in prompt.text.split()]

    def sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return ()

    def grammars(self, vocabulary: int) -> None:
        return None

    def answer(self, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> str:
        return " ".join(map(str, token_ids))

    def stop_texts(self, stop: Sequence[str]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class DoubleToken:
    """A token of the double."""

    id: int
    logprob: float = -0.5
    top: None = None


@dataclass(eq=False, slots=True)
class DoubleRequest:
    """Generates its candidate's id and the token's number; counts the blocks it would hold."""

    engine: DoubleEngine
    candidate: int
    prompt_tokens: int
    num_made: int = 0

    async def generate(self, count: int) -> AsyncGenerator[DoubleToken, None]:
        await self.engine.gate.wait()
        if self.candidate == self.engine.failing:
            raise InternalError("the generator's step failed")
        self.engine.hold(self, count)
        for _ in range(count):
            self.num_made += 1
            ends = self.num_made == self.engine.ends.get(self.candidate)
            yield DoubleToken(EOS if ends else 1000 * self.candidate + self.num_made)
            if ends:
                return


@dataclass(eq=False, slots=True)
class DoubleSession:
    """Makes the requests of a session."""

    engine: DoubleEngine
    prompt_tokens: int

    def request(self, candidate: int, given: Sequence[int] = ()) -> DoubleRequest:
        return DoubleRequest(self.engine, candidate, self.prompt_tokens, len(given))


@dataclass(eq=False, slots=True)
class DoubleEngine:
    """A double of VLLMEngine; `ends`: after how many tokens a candidate ends by itself."""

    capacity_slots: int = 400
    max_rows: int = 16
    ends: dict[int, int] = field(default_factory=dict)
    failing: int | None = None
    block_tokens: int = BLOCK
    eos_ids: frozenset[int] = frozenset({EOS})
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[DoubleRequest, int] = field(default_factory=dict)
    most_held: int = 0
    num_growing: int = 0
    closed: bool = False

    def session(self, session_id: int, command: OpenCommand) -> DoubleSession:
        return DoubleSession(self, len(command.prompt_ids))

    def hold(self, request: DoubleRequest, count: int) -> None:
        """Blocks of its own for what is stored once it has written so many more tokens."""
        shared = (request.prompt_tokens - 1) // BLOCK * BLOCK
        stored = request.prompt_tokens - shared + request.num_made + count - 1
        self.held[request] = -(-stored // BLOCK) * BLOCK
        self.most_held = max(self.most_held, sum(self.held.values()) + shared)
        assert len(self.held) <= self.max_rows

    async def abort(self, requests: Sequence[DoubleRequest]) -> None:
        for request in requests:
            self.held.pop(request, None)

    def growing(self, *, more: int) -> None:
        self.num_growing += more

    def heartbeat_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True


def make(engine: DoubleEngine, **options: int) -> VLLMGenerator:
    engine.gate.set()
    card = GeneratorDescription(
        "double",
        "f",
        256,
        engine.max_rows,
        10_000,
        1,
        "none",
        SlotGauge(0, 0, 0),
        auto_candidates=64,
    )
    return VLLMGenerator(engine, Words(), card, **options)  # type: ignore[arg-type]


def opened(
    generator: VLLMGenerator, n: int, sampling: Sampling = ENDLESS, first: int = 4
) -> AbstractAsyncContextManager[VLLMSession]:
    return generator.open(SessionSpec(PROMPT, n, sampling, first))


def check_idle(generator: VLLMGenerator) -> None:
    """No session is open or waits, and no slot or block is in use."""
    engine = generator.engine
    assert isinstance(engine, DoubleEngine)
    generator.ledger.check_integrity()
    load = generator.load()
    assert (load.sessions, load.waiting, load.slots.owned) == (0, 0, 0)
    assert not engine.held and not engine.num_growing


@pytest.fixture
def engine() -> DoubleEngine:
    return DoubleEngine()


@pytest.fixture
def generator(engine: DoubleEngine) -> Iterator[VLLMGenerator]:
    """Idle after each test."""
    generator = make(engine)
    yield generator
    check_idle(generator)


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


@given(
    n=st.integers(1, 16),
    capacity=st.integers(60, 500),
    max_tokens=st.integers(1, 60),
    ends=st.dictionaries(st.integers(0, 15), st.integers(1, 60)),
    cuts=st.lists(st.integers(1, 60), max_size=6),
)
def test_the_ledger_counts_at_least_the_blocks_held(
    n: int, capacity: int, max_tokens: int, ends: dict[int, int], cuts: list[int]
) -> None:
    """Guards against preemption by vLLM. Every round makes progress or ends by SLOTS_FULL."""

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
                assert not session.live, "the session does not end"
            assert len(set(finished)) == len(finished)
        except InvalidRequest as error:
            assert error.reason == "SLOTS_EXCEEDED"
        assert engine.most_held <= engine.capacity_slots
        check_idle(generator)

    asyncio.run(run())


async def visit(generator: VLLMGenerator) -> None:
    """A session of 4 candidates and one round."""
    async with opened(generator, 4) as session:
        await session.extend(4)


async def test_no_more_requests_are_open_than_vllm_schedules() -> None:
    """Requests that wait between two rounds count."""
    generator = make(DoubleEngine(4000, max_rows=10))

    async with opened(generator, 7) as session:
        await session.extend(4)
        async with opened(generator, 0) as filling:
            assert filling.n == 3
            waiting = asyncio.create_task(visit(generator))
            await filling.extend(4)
            assert generator.load().waiting == 1
            await session.prune([0, 1, 2])
            await waiting
    check_idle(generator)


async def test_a_failure_ends_its_session_and_no_other() -> None:
    generator = make(DoubleEngine(failing=1))
    async with opened(generator, 1) as other:
        async with opened(generator, 3) as session:
            with pytest.raises(InternalError):
                await session.extend(8)
            with pytest.raises(SessionExpired):
                await session.extend(8)
        assert (await other.extend(8)).num_tokens == 8
    check_idle(generator)


async def test_a_cancelled_prune_frees_what_it_rejects(
    engine: DoubleEngine, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against requests that wait in vLLM for ever, with their blocks."""
    begun, abort = asyncio.Event(), engine.abort

    async def slow(_: DoubleEngine, requests: Sequence[DoubleRequest]) -> None:
        begun.set()
        await engine.gate.wait()
        await abort(requests)

    monkeypatch.setattr(DoubleEngine, "abort", slow)
    async with opened(generator, 3) as session:
        await session.extend(8)
        engine.gate.clear()
        pruning = asyncio.create_task(session.prune([0], {3: 0}))
        await begun.wait()
        pruning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pruning
        engine.gate.set()
    await until(lambda: not engine.held)


async def test_warm_up_and_end() -> None:
    """Guards against a valid setting with which the process ends after loading."""
    engine = DoubleEngine(max_rows=1)
    generator = make(engine)
    await generator.warm_up()
    check_idle(generator)
    generator.close()
    assert engine.closed
