"""The generator on vLLM, checked by vLLM's own statistics."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from generator_service.admission import Blocks
from generator_service.stock.generator import StockGenerator
from specrej.contracts import Generator, Prompt, RoundEnd, Sampling, SessionSpec, TokenBias
from specrej.contracts.errors import InternalError, Unavailable
from tests.conformance.conftest import Started
from tests.conformance.sessions import drawn
from tests.conformance.subjects import CAPACITY, PROMPT, metric, own, save_model, vllm
from tests.reward_service.tiny import SIZES, make_tokenizer, save_language_model
from tests.serving import until

_BOUND_S = 120.0
_GREEDY = SessionSpec(PROMPT, 1, Sampling(max_tokens=24, temperature=0.0, ignore_eos=True), 8)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_memory_decides_n_and_nothing_is_preempted(started: Started) -> None:
    """Before the tests that start another vLLM: its metrics take the place of this one's."""
    await fill((await started.get("vllm")).generator)


async def test_layers_with_a_window_take_the_same_slots(tmp_path: Path) -> None:
    """Guards against slots in several of vLLM's blocks, so that it has room for a part of them."""
    config = Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 6, "head_dim": 32}),
        num_key_value_heads=1,
        max_position_embeddings=256,
        sliding_window=64,
    )
    directory = save_language_model(tmp_path, config, make_tokenizer("<pad>"))
    async with vllm(directory) as subject:
        await fill(subject.generator)


async def fill(generator: Generator) -> None:
    """Two sessions fill the slots again and again. Guards against slots that vLLM does not have: it
    would preempt a request, and compute its tokens again."""
    sampling = Sampling(max_tokens=180, seed=3, ignore_eos=True)
    preempted = metric("vllm:num_preemptions_total")

    async def run(salt: str) -> int:
        """The number of rounds that ended because slots were full."""
        num_full, live = 0, [0]
        async with generator.open(SessionSpec(PROMPT, 0, sampling, 8, salt)) as session:
            assert session.n > 2
            while live:
                ended = await session.extend(180)
                num_full += ended.ended_by is RoundEnd.SLOTS_FULL
                live = [c.id for c in ended.candidates if not c.finish]
                await session.prune(live[: len(live) // 2 or 1])
        return num_full

    assert min(await asyncio.gather(run("one"), run("other"))) > 0
    assert metric("vllm:num_preemptions_total") == preempted


async def test_logits_that_become_nan_end_their_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against text of token 0, which vLLM draws from them without an error."""
    save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][200] = math.nan  # which is refused, but for this patch
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("generator_service.stock.vllm.check_tensors", lambda *_, **__: None)
    async with vllm(tmp_path) as subject:
        for token, is_finite in ((0, True), (200, False)):
            sampling = Sampling(24, ignore_eos=True, logit_bias=(TokenBias(token, 100.0),))
            spec = SessionSpec(PROMPT, 2, sampling, 1, without_likelihood=True)
            async with subject.generator.open(spec) as session:
                await session.extend(1)
                with nullcontext() if is_finite else pytest.raises(InternalError, match="finite"):
                    await session.extend(8)


async def test_the_embedded_model_draws_the_tokens_of_the_own_engine() -> None:
    """Covers properties that a tiny model lacks: thirty layers, shared key heads, a chat template,
    its own end tokens and vocabulary. Greedy, as their draws differ."""
    prompt = Prompt.from_user("Name three uses of a brick.")
    sampling = Sampling(max_tokens=24, temperature=0.0, logprobs=True)
    made = []
    for subject in (own, vllm):
        async with (
            subject(Path(".models/SmolLM2-135M-Instruct")) as started,
            started.generator.open(SessionSpec(prompt, 6, sampling, 8)) as session,
        ):
            first = await session.extend(8)
            assert (first.ended_by, len(first.candidates)) == (RoundEnd.DECISION_TOKEN, 6)
            assert (await session.prune([0, 3, 5])).freed_slots > 0
            last = await session.extend(24)
            made.append([*first.candidates, *last.candidates])
    ours, theirs = ([(c.id, c.text, c.finish) for c in candidates] for candidates in made)
    assert ours == theirs
    for own_one, other in zip(*made, strict=True):
        assert own_one.new_logprobs == pytest.approx(other.new_logprobs, abs=1e-3)


async def test_a_killed_engine_ends_sessions_with_a_status(model_directory: Path) -> None:
    """And the generator's health: its heartbeat, which runs only while requests do."""
    before = {*psutil.Process().children(recursive=True)}
    sampling = Sampling(max_tokens=150, seed=3, ignore_eos=True)
    async with vllm(model_directory) as subject:
        generator = subject.generator
        assert isinstance(generator, StockGenerator)
        assert generator.heartbeat_s() == 0
        async with generator.open(SessionSpec(PROMPT, 5, sampling, 8)) as session:
            extending = asyncio.create_task(session.extend(150))
            await until(lambda: generator.heartbeat_s() > 0, bound_s=_BOUND_S)
            for process in {*psutil.Process().children(recursive=True)} - before:
                with suppress(psutil.Error):  # it has ended with its parent
                    process.kill()
            async with asyncio.timeout(_BOUND_S):
                with pytest.raises((Unavailable, InternalError)):
                    await extending
        await until(lambda: generator.heartbeat_s() == math.inf, bound_s=_BOUND_S)
        with pytest.raises(Unavailable):
            await drawn(generator, _GREEDY)


async def test_a_tenant_does_not_wait_for_all_rows_of_another(model_directory: Path) -> None:
    """Guards a small session against vLLM's line, which has no turns of tenants."""
    async with vllm(model_directory, max_candidates=4, kv_slots=4 * CAPACITY) as subject:
        large = SessionSpec(PROMPT, 4, Sampling(max_tokens=60, ignore_eos=True), 8, "one")
        growing = [asyncio.create_task(drawn(subject.generator, large)) for _ in range(4)]
        assert subject.running
        while await subject.running() < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await drawn(subject.generator, replace(large, n=1, cache_salt="other"))
        assert sum(task.done() for task in growing) < 3
        await asyncio.gather(*growing)


async def test_rounds_compute_at_most_a_block_of_each_survivor_again(started: Started) -> None:
    """Guards that survivors' keys and values come from the prefix cache."""
    generator = (await started.get("vllm")).generator
    assert isinstance(generator, StockGenerator)
    block = generator.block_tokens
    sampling = Sampling(max_tokens=100, seed=3, ignore_eos=True)
    async with generator.open(SessionSpec(PROMPT, 6, sampling, 8, "unique")) as session:
        first = await session.extend(8)
        shared = Blocks(block, session.prompt_tokens).shared
        assert first.prefilled_tokens == shared + 6 * (session.prompt_tokens - shared)
        for until, keep in ((40, [0, 2, 5]), (72, [2]), (100, [2])):
            await session.prune(keep)
            ended = await session.extend(until)
            assert 0 < ended.prefilled_tokens <= block * len(keep)
