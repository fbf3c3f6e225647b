"""The generator on vLLM, checked by vLLM's own statistics."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from transformers import Gemma3TextConfig

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from generator_service.admission import BLOCK_TOKENS, Blocks
from generator_service.capacity import Capacity, reader, weight_bytes
from generator_service.plan import read_config
from generator_service.settings import GeneratorSettings
from generator_service.vllm_engine import VLLMEngine
from generator_service.vllm_generator import VLLMGenerator
from specrej.contracts import Prompt, RoundEnd, Sampling, SessionSpec
from specrej.errors import InternalError, Unavailable
from specrej.inference.sizes import ModelSizes
from tests.conformance.conftest import Started
from tests.conformance.subjects import PROMPT, VLLM_OPTIONS, own, vllm
from tests.reward_service.tiny import SIZES, make_tokenizer, save_language_model
from tests.serving import until

_BOUND_S = 120.0

pytestmark = pytest.mark.asyncio(loop_scope="session")


def test_a_shorter_context_is_a_limit(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an internal error for a text beyond vLLM's max_model_len."""

    def started(arguments: Any, **_: Any) -> Any:
        return SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=arguments.max_model_len),
                cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=64),
                scheduler_config=SimpleNamespace(max_num_seqs=8),
            )
        )

    monkeypatch.setattr("vllm.AsyncLLMEngine.from_engine_args", started)

    def context_tokens(setting: int = 0, **options: object) -> int:
        settings = GeneratorSettings(
            engine="vllm",
            model=str(model_directory),
            kv_slots=96,
            context_tokens=setting,
            vllm_options=options,
        )
        return VLLMEngine.load(settings).shape.context_tokens

    assert context_tokens() > 96  # a small kv_slots is no limit of the context
    assert context_tokens(80) == 80
    assert context_tokens(80, max_model_len=64) == 64


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_plan_has_the_slots_that_vllm_allocates(
    kind: str, model_directory: Path, tmp_path: Path
) -> None:
    """Also where some layers have a sliding window. Guards against slots that vLLM stores in
    several blocks, so that it has room for a part of them only."""
    if kind == "gemma3_text":
        config = Gemma3TextConfig(
            **(SIZES | {"num_hidden_layers": 6, "head_dim": 32}),
            num_key_value_heads=1,
            max_position_embeddings=256,
            sliding_window=64,
        )
        model_directory = save_language_model(tmp_path, config, make_tokenizer("<pad>"))
    command = [sys.executable, "-m", "tests.conformance.allocated", str(model_directory), "1024"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    allocated = json.loads(outcome.stdout.splitlines()[-1])
    read = reader(read_config(model_directory))
    planned = Capacity(
        ModelSizes.of(read),
        weight_bytes=weight_bytes(read, "cpu", 1, is_vllm=True),
        usable_bytes=0,
        context_tokens=256,
        max_candidates=32,
        prefill_chunk=256,
        device="cpu",
        is_vllm=True,
    )
    assert allocated["block_tokens"] == BLOCK_TOKENS["cpu"]
    assert allocated["kv_bytes"] == allocated["blocks"] * 32 * planned.slot_bytes
    used = planned.weight_bytes + planned.workspace_bytes
    planned = replace(planned, usable_bytes=used + allocated["kv_bytes"])
    assert planned.slots == 1024


async def test_the_embedded_model_draws_the_tokens_of_the_own_engine() -> None:
    """Covers properties that a tiny model lacks: thirty layers, shared key heads, a chat template,
    its own end tokens and vocabulary."""
    prompt = Prompt.from_user("Name three uses of a brick.")
    sampling = Sampling(max_tokens=24, seed=5, logprobs=True)
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
    assert [(c.id, c.text, c.finish) for c in made[0]] == [
        (c.id, c.text, c.finish) for c in made[1]
    ]
    for ours, theirs in zip(*made, strict=True):
        assert ours.new_logprobs == pytest.approx(theirs.new_logprobs, abs=1e-3)


@pytest.mark.skipif(
    "tensor_parallel_size" not in VLLM_OPTIONS, reason="one worker: make conformance-distributed"
)
async def test_a_killed_worker_ends_sessions_with_a_status(model_directory: Path) -> None:
    """Guards against a request that waits for ever, and a dead engine that counts as healthy."""
    long = Sampling(max_tokens=200, ignore_eos=True)
    for is_killed in (True, False):  # the second one is the restart
        async with vllm(model_directory) as subject, asyncio.timeout(_BOUND_S):
            generator = subject.generator
            assert isinstance(generator, VLLMGenerator)
            async with generator.open(SessionSpec(PROMPT, 2, long, 8)) as session:
                assert (await session.extend(8)).num_tokens == 8
                if not is_killed:
                    continue
                children = psutil.Process().children(recursive=True)
                (worker,) = [child for child in children if "Worker_TP1" in child.cmdline()[0]]
                growing = asyncio.create_task(session.extend(200))
                worker.kill()
                with pytest.raises((Unavailable, InternalError)):
                    await growing
            await until(partial(_has_ended, generator), bound_s=_BOUND_S)


def _has_ended(generator: VLLMGenerator) -> bool:
    return generator.heartbeat_s() == math.inf


async def test_pausing_and_cutting_compute_nothing_again(started: Started) -> None:
    """The prompt once, its last token by each candidate, and every token once.

    Guards that survivors' keys and values stay in place between rounds.
    """
    subject = await started.get("vllm")
    generator = subject.generator
    assert isinstance(generator, VLLMGenerator)
    subject.steps.clear()
    sampling = Sampling(max_tokens=100, seed=3, ignore_eos=True)
    async with generator.open(SessionSpec(PROMPT, 6, sampling, 8, "unique")) as session:
        blocks = Blocks(generator.engine.block_tokens, session.prompt_tokens)
        for until, keep in ((8, [0, 2, 5]), (40, [2]), (99, [2])):
            ended = await session.extend(until)
            # vLLM never holds more than the ledger counts, so it never preempts.
            assert isinstance(generator.engine, VLLMEngine)
            assert 0 < generator.engine.used_slots <= ended.slots.owned
            await session.prune(keep)
    assert blocks.shared > 0
    assert session.prompt_tokens - 1 > blocks.shared, "the prompt ends within a block"
    assert sum(step.prefilled for step in subject.steps) == session.prompt_tokens + 5
    assert sum(step.reused for step in subject.steps) == 5 * (session.prompt_tokens - 1)
    assert sum(step.generated for step in subject.steps) == 6 * 8 + 3 * 32 + 59
