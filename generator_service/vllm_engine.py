"""vLLM as an engine of candidates that write, pause and write on; public interfaces of it only.

A candidate is one request with *streaming input*: vLLM runs it for so many tokens, then lets it
wait for more input with its keys and values in place. The newest token of a chunk is not stored
yet; it is the input of the next one. So a pause computes nothing again, nothing runs ahead, and
what waits cannot be preempted. Two other ways were weighed. A request per round finds whole blocks
in the prefix cache, if they were not given up, and computes each survivor's last block, 16 tokens
on average, again in every round. A request that runs on while its output is held back computes what
rejection is there to save.

Likelihoods are vLLM's `raw_logprobs`: temperature 1, the whole distribution. Draws are ours
(vllm_draw.py). Knows no text, no prompt's meaning and no slots but their number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vllm
from transformers import AutoConfig, GenerationConfig
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from generator_service import vllm_draw
from generator_service.settings import GeneratorSettings
from generator_service.steps import OnStep, Step
from specrej.contracts import Sampling
from specrej.errors import InternalError, Unavailable

log = logging.getLogger(__name__)

VERSION = vllm.__version__

# Tokens of a block where the settings say nothing: on CPUs the fewest that its kernels like.
_CPU_BLOCK_TOKENS = 32

# Blocks that no candidate is given: vLLM keeps one for itself, the other makes up for its counting
# the newest token, which is never stored, against the longest text.
_SPARE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Token:
    """One token, and its log-probability at temperature 1 over the whole distribution."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model from its configuration."""

    context_tokens: int
    vocabulary: int
    eos_ids: frozenset[int]
    slot_bytes: int
    dtype: str

    @classmethod
    def read(cls, directory: Path, dtype: str) -> Shape:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        bytes_each = 4 if dtype == "float32" else 2
        return cls(
            context_tokens=config.max_position_embeddings,
            vocabulary=config.vocab_size,
            eos_ids=_eos_ids(directory, config),
            slot_bytes=2 * config.num_hidden_layers * kv_heads * head_dim * bytes_each,
            dtype=dtype,
        )


class Writer:
    """One candidate's request."""

    def __init__(
        self,
        llm: Any,
        name: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        candidate: int,
        eos_ids: frozenset[int],
        salt: str,
        watched: bool,
    ) -> None:
        """`watched`: each token is wanted as soon as it is there, not at the end of a chunk."""
        self.name = name
        self._sampling = sampling
        self._candidate = candidate
        self._eos_ids = sorted(eos_ids)
        self._watched = watched
        self._chunks: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._next = tokens_input(list(prompt_ids), cache_salt=salt or None)
        self._num_tokens = 0
        self._outputs: AsyncGenerator[Any, None] = llm.generate(
            self._inputs(), self._params(sampling.max_tokens), name
        )

    async def write(self, count: int) -> AsyncGenerator[Token, None]:
        """At most `count` more tokens, fewer if one of them ends the text; then it waits."""
        self._chunks.put_nowait(StreamingInput(self._next, self._params(count)))
        finished = None
        while finished is None:
            output = await self._output()
            finished = output.finish_reason
            for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
                self._num_tokens += 1
                self._next = tokens_input([token_id])
                yield Token(token_id, logprobs[token_id].logprob)
        if finished not in ("stop", "length"):
            raise InternalError(f"vLLM ended a candidate by {finished}")

    async def close(self) -> None:
        """Let go of the request; `abort` comes first where there are many."""
        await self._outputs.aclose()

    async def _output(self) -> Any:
        """Raises Unavailable: vLLM is gone; InternalError: it failed."""
        try:
            return (await anext(self._outputs)).outputs[0]
        except EngineDeadError as error:
            raise Unavailable("the engine is gone") from error
        except Exception as error:
            log.exception("vLLM failed")
            raise InternalError("the generator's step failed") from error

    async def _inputs(self) -> AsyncGenerator[StreamingInput, None]:
        while True:
            yield await self._chunks.get()

    def _params(self, count: int) -> SamplingParams:
        sampling = self._sampling
        return SamplingParams(
            max_tokens=count,
            temperature=0.0,  # of the tokens there is one left that can be
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_eos else self._eos_ids,
            detokenize=False,
            logprobs=0,  # of the token that is drawn alone
            output_kind=RequestOutputKind.DELTA,
            stream_interval=1 if self._watched else max(2, count),
            extra_args=vllm_draw.arguments(
                sampling,
                self._candidate,
                self._num_tokens,
                self._eos_ids if sampling.min_tokens else (),
            ),
        )


class VLLMEngine:
    """A running vLLM. Its calls belong to one event loop, that of the first of them."""

    def __init__(self, llm: Any, shape: Shape, watch: Watch) -> None:
        self._llm: Any | None = llm
        self._watch = watch
        self._names = itertools.count(1)
        cache = llm.vllm_config.cache_config
        self.shape = shape
        self.eos_ids = shape.eos_ids
        self.block_tokens: int = cache.block_size
        self.capacity_slots = (cache.num_gpu_blocks - _SPARE_BLOCKS) * self.block_tokens
        self.max_rows: int = llm.vllm_config.scheduler_config.max_num_seqs
        self.device: str = current_platform.device_name

    @classmethod
    def load(cls, settings: GeneratorSettings, on_step: OnStep | None = None) -> VLLMEngine:
        """A vLLM of the settings' model; `on_step` is called on the event loop.

        Raises:
            Exception: whatever vLLM says when it cannot start.
        """
        watch = Watch(on_step)
        on_cpu = current_platform.is_cpu()
        shape = Shape.read(settings.model_directory, "float32" if on_cpu else "bfloat16")
        arguments = AsyncEngineArgs(**_arguments(settings, shape, on_cpu=on_cpu))
        llm = AsyncLLMEngine.from_engine_args(
            arguments, stat_loggers=[lambda config, index: _Stats(watch)]
        )
        if "max_model_len" in settings.vllm_options:  # else few slots may have made it less
            longest = llm.vllm_config.model_config.max_model_len
            shape = replace(shape, context_tokens=longest)
        return cls(llm, shape, watch)

    def writer(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        candidate: int,
        *,
        salt: str = "",
        watched: bool = False,
    ) -> Writer:
        """A candidate's request, which costs nothing until it writes."""
        name = f"{next(self._names)}"
        ends = self.eos_ids
        return Writer(self._llm, name, prompt_ids, sampling, candidate, ends, salt, watched)

    async def abort(self, writers: Sequence[Writer]) -> None:
        """Take everything from them; in vLLM's order of things, before whatever is asked next."""
        if self._llm and writers:
            await self._llm.abort([writer.name for writer in writers])
        for writer in writers:
            await writer.close()

    def growing(self, *, more: int) -> None:
        """So many more requests are to make tokens; fewer if it is negative."""
        self._watch.grow(more)

    @property
    def used_slots(self) -> int:
        """What vLLM said last of the blocks that requests hold."""
        slots = self.capacity_slots + self.block_tokens  # vLLM counts one of the spare blocks
        return int(self._watch.usage * slots + 0.5)

    def heartbeat_s(self) -> float:
        """Seconds since the last step, while there is something to do; infinite without a vLLM."""
        if self._llm is None or self._llm.errored:
            return math.inf
        return self._watch.silent_s()

    def close(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm:
            llm.shutdown()


class Watch:
    """What is seen of vLLM at work."""

    def __init__(self, on_step: OnStep | None) -> None:
        self.usage: float = 0.0  # of the blocks that can be had
        self._on_step = on_step
        self._num_growing = 0
        self._last_sign = 0.0

    def grow(self, more: int) -> None:
        if not self._num_growing:
            self._last_sign = time.monotonic()
        self._num_growing += more

    def silent_s(self) -> float:
        return time.monotonic() - self._last_sign if self._num_growing else 0.0

    def step(self, scheduler: Any, iteration: Any) -> None:
        """vLLM's statistics of a step."""
        seconds, self._last_sign = time.monotonic() - self._last_sign, time.monotonic()
        self.usage = scheduler.kv_cache_usage if scheduler else self.usage
        if self._on_step and iteration:
            prompts = iteration.prompt_token_stats
            generated = iteration.num_generation_tokens
            self._on_step(
                Step(seconds, generated, generated, prompts.computed, prompts.local_cache_hit)
            )


class _Stats(StatLoggerBase):  # type: ignore[misc]
    """Where vLLM puts its statistics."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._watch.step(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """It speaks for itself."""


def _arguments(settings: GeneratorSettings, shape: Shape, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's own, those of the settings last: theirs win."""
    arguments: dict[str, Any] = {
        "model": str(settings.model_directory),
        "dtype": shape.dtype,
        "max_model_len": shape.context_tokens,
        "max_num_seqs": settings.max_candidates,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "gpu_memory_utilization": settings.memory_fraction,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": [f"{vllm_draw.__name__}:{vllm_draw.KeyedDraws.__name__}"],
        **({"block_size": _CPU_BLOCK_TOKENS} if on_cpu else {}),
        **settings.vllm_options,
    }
    if settings.kv_slots:
        arguments |= _capacity(settings.kv_slots, arguments, shape, on_cpu=on_cpu)
    return arguments


def _capacity(
    slots: int, arguments: dict[str, Any], shape: Shape, *, on_cpu: bool
) -> dict[str, Any]:
    """What makes vLLM have so many slots, in whole blocks; its texts cannot be longer than that."""
    block = arguments.setdefault("block_size", 16)
    blocks = slots // block + _SPARE_BLOCKS
    longest = min(arguments["max_model_len"], (blocks - 1) * block)
    told: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": longest}
    if on_cpu:
        told["kv_cache_memory_bytes"] = blocks * block * shape.slot_bytes
    return told


def _eos_ids(directory: Path, config: Any) -> frozenset[int]:
    try:
        ids = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    except OSError:
        ids = None
    ids = config.eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
