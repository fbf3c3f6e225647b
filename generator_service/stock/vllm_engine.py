"""vLLM as an engine of candidates that pause between rounds; uses its public interfaces only.

A candidate is one request with *streaming input*: vLLM runs it for a number of tokens, then keeps
it waiting for more input with its keys and values in place. The newest token of a chunk is not
stored yet; it is the input of the next one. So a pause computes nothing again, nothing runs ahead,
and a request that waits cannot be preempted. Two alternatives were rejected. A request per round
finds whole blocks in the prefix cache, if they were not evicted, and computes each survivor's last
block, 16 tokens on average, again in every round. A request that runs on while its output is held
back computes tokens that rejection discards.

Log-probabilities are vLLM's `raw_logprobs`: temperature 1, the whole distribution. Draws are those
of vllm_draw.py.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vllm
from transformers import AutoConfig
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from generator_service.admission import SPARE_BLOCKS
from generator_service.budget import batched_tokens
from generator_service.engine.commands import OnStep, OpenCommand, Step, Top
from generator_service.engine.sampling import LEAST_LOGPROB
from generator_service.settings import GeneratorSettings
from generator_service.stock import vllm_draw, vllm_prompts
from specrej.contracts import Sampling
from specrej.contracts.errors import InternalError, Unavailable
from specrej_models.sizes import ModelSizes
from specrej_models.vllm_options import BLOCK_TOKENS

log = logging.getLogger(__name__)

VERSION = vllm.__version__

# Bytes of a number of vLLM's `dtype` ("auto" has two) or `kv_cache_dtype`; others have at most one.
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2}


@dataclass(frozen=True, slots=True)
class Token:
    """One token, its log-probability at temperature 1 over the whole distribution, and if requested
    the most probable tokens of its step."""

    id: int
    logprob: float
    top: Top | None


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, from its configuration."""

    context_tokens: int
    vocabulary: int
    slot_bytes: int
    dtype: str

    @classmethod
    def read(cls, directory: Path, dtype: str, stored: str) -> Shape:
        """Keys and values are of the type `stored`, a name of vLLM's."""
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        sizes = ModelSizes.of(config)
        return cls(
            context_tokens=sizes.context_tokens,
            vocabulary=sizes.vocabulary,
            slot_bytes=sizes.slot_bytes(_BYTES.get(stored, 1)),
            dtype=dtype,
        )


class SessionRequests:
    """Makes the requests of a session's candidates."""

    def __init__(
        self,
        llm: Any,
        names: Iterator[int],
        eos_ids: frozenset[int],
        adapter: LoRARequest | None,
        session: str,
        command: OpenCommand,
    ) -> None:
        sampling = command.sampling
        ends = eos_ids.union(sampling.stop_token_ids)
        self._llm = llm
        self._names = names
        self._adapter = adapter
        self._command = command
        self._stop_ids = sorted(sampling.stop_token_ids if sampling.ignore_eos else ends)
        self._common = vllm_draw.common_arguments(
            session,
            len(command.prompt_ids),
            sampling,
            sorted(ends) if sampling.min_tokens or command.grammar else (),
            command.bad_words,
            command.grammar.source if command.grammar else "",
        )
        self._params: SamplingParams | None = None  # the last ones

    def request(self, candidate: int, given: Sequence[int] = ()) -> CandidateRequest:
        """A candidate's request, which takes no resources before `generate`.

        `given` are tokens that it has already. The prompt is read once for all candidates.
        """
        command, name = self._command, f"{next(self._names)}"
        prompt = tokens_input([*command.prompt_ids, *given], cache_salt=command.cache_salt or None)
        return CandidateRequest(
            *(self, self._llm, name, prompt, candidate, len(given)),
            *(command.sampling, self._adapter),
        )

    def params(
        self, candidate: int, step: int, count: int, *, at_once: bool = False
    ) -> SamplingParams:
        """Parameters of a request for `count` tokens, the first of which is number `step`; it sends
        each token `at_once`, or all at the end."""
        at_once = at_once or self._command.stop_texts is not None
        interval = 1 if at_once else max(2, count)
        params = self._params
        if params is None or (params.max_tokens, params.stream_interval) != (count, interval):
            params = self._params = SamplingParams(
                max_tokens=count,
                temperature=0.0,  # KeyedDraws leaves one possible token
                ignore_eos=True,
                stop_token_ids=self._stop_ids,
                detokenize=False,
                logprobs=self._command.sampling.top_logprobs,  # and of the drawn token
                output_kind=RequestOutputKind.DELTA,
                stream_interval=interval,
                skip_clone=True,  # what a request changes is its own
            )
        params = copy.copy(params)
        params.extra_args = vllm_draw.arguments(self._common, candidate, step)
        return params


class CandidateRequest:
    """One candidate's request to vLLM."""

    def __init__(
        self,
        session: SessionRequests,
        llm: Any,
        name: str,
        prompt: Any,
        candidate: int,
        num_tokens: int,
        sampling: Sampling,
        adapter: LoRARequest | None,
    ) -> None:
        self.name = name
        self._session = session
        self._candidate = candidate
        self._num_tokens = num_tokens
        self._most = sampling.top_logprobs
        self._chunks: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._next = prompt
        params = session.params(candidate, num_tokens, sampling.max_tokens)
        self._outputs: AsyncGenerator[Any, None] = llm.generate(
            self._inputs(), params, name, lora_request=adapter
        )

    async def generate(self, count: int, *, at_once: bool = False) -> AsyncGenerator[Token, None]:
        """At most `count` more tokens, fewer if one of them ends the text; then it pauses. It
        yields each token `at_once`, or all at the end."""
        params = self._session.params(self._candidate, self._num_tokens, count, at_once=at_once)
        self._chunks.put_nowait(StreamingInput(self._next, params))
        finished, most = None, self._most
        while finished is None:
            output = await self._output()
            finished = output.finish_reason
            for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
                self._num_tokens += 1
                self._next = tokens_input([token_id])
                if math.isnan(logprobs[token_id].logprob):
                    raise InternalError("the model's logits are not finite")
                top = _top(logprobs, most) if most else None
                yield Token(token_id, logprobs[token_id].logprob, top)
        if finished not in ("stop", "length"):
            raise InternalError(f"vLLM ended a candidate by {finished}")

    async def close(self) -> None:
        await self._outputs.aclose()

    async def _output(self) -> Any:
        """Raises Unavailable: vLLM has ended; InternalError: it failed."""
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


def _top(logprobs: Mapping[int, Any], most: int) -> Top:
    """The most probable tokens: vLLM returns the drawn one, too, with its rank."""
    best = sorted(logprobs, key=lambda token_id: logprobs[token_id].rank)[:most]
    return best, [max(logprobs[token_id].logprob, LEAST_LOGPROB) for token_id in best]


class VLLMEngine:
    """A running vLLM. Its calls belong to one event loop, that of the first of them."""

    def __init__(
        self,
        llm: Any,
        shape: Shape,
        eos_ids: frozenset[int],
        statistics: Statistics,
        adapters: Mapping[str, Path],
    ) -> None:
        self._llm: Any | None = llm
        self._adapters = {
            name: LoRARequest(name, number, str(directory))
            for number, (name, directory) in enumerate(adapters.items(), 1)
        }
        self._statistics = statistics
        self._names = itertools.count(1)
        cache = llm.vllm_config.cache_config
        self.shape = shape
        self.eos_ids = eos_ids
        self.block_tokens: int = cache.block_size
        self.capacity_slots = (cache.num_gpu_blocks - SPARE_BLOCKS) * self.block_tokens
        self.max_rows: int = llm.vllm_config.scheduler_config.max_num_seqs
        self.device: str = current_platform.device_name

    @classmethod
    def load(
        cls, settings: GeneratorSettings, eos_ids: frozenset[int], on_step: OnStep | None = None
    ) -> VLLMEngine:
        """A vLLM of the settings' model; `on_step` is called on the event loop.

        Raises:
            Exception: any of vLLM's, if it cannot start.
        """
        statistics = Statistics(on_step)
        shape = _shape(settings)
        arguments = AsyncEngineArgs(**_arguments(settings, shape))
        llm = AsyncLLMEngine.from_engine_args(
            arguments, stat_loggers=[lambda config, index: statistics]
        )
        if "max_model_len" in settings.vllm_options:  # else a small kv_slots may have reduced it
            longest = llm.vllm_config.model_config.max_model_len
            shape = replace(shape, context_tokens=longest)
        return cls(llm, shape, eos_ids, statistics, settings.adapters)

    def session(self, session_id: int, command: OpenCommand) -> SessionRequests:
        """The maker of a session's requests."""
        adapter = self._adapters[command.adapter] if command.adapter else None
        return SessionRequests(
            self._llm, self._names, self.eos_ids, adapter, f"{session_id}", command
        )

    async def abort(self, requests: Sequence[CandidateRequest]) -> None:
        """Free all that requests hold; vLLM does so before it handles any later call."""
        if self._llm and requests:
            await self._llm.abort([request.name for request in requests])
        for request in requests:
            await request.close()

    def growing(self, *, more: int) -> None:
        """Count `more` requests that generate tokens now; negative: fewer."""
        self._statistics.grow(more)

    def heartbeat_s(self) -> float:
        """Seconds since the last step while requests generate; infinite if vLLM has ended."""
        if self._llm is None or self._llm.errored:
            return math.inf
        return self._statistics.silent_s()

    def close(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm:
            llm.shutdown()


class Statistics(StatLoggerBase):  # type: ignore[misc]
    """Receives vLLM's statistics of each step."""

    def __init__(self, on_step: OnStep | None) -> None:
        self.usage: float = 0.0  # share of the blocks that requests hold
        self._on_step = on_step
        self._num_growing = 0
        self._last_step = 0.0  # time of the last step, or of the first request that grows

    def grow(self, more: int) -> None:
        if not self._num_growing:
            self._last_step = time.monotonic()
        self._num_growing += more

    def silent_s(self) -> float:
        return time.monotonic() - self._last_step if self._num_growing else 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        now = time.monotonic()
        seconds, self._last_step = now - self._last_step, now
        self.usage = scheduler_stats.kv_cache_usage if scheduler_stats else self.usage
        if self._on_step and scheduler_stats:
            for step in _steps(seconds, scheduler_stats.num_running_reqs, iteration_stats):
                self._on_step(step)

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""


def _steps(seconds: float, running: int, stats: Any) -> list[Step]:
    """The steps of one message, all alike: as many as a request has tokens in it.

    running: requests that go on; stats: vLLM's of the tokens, None if there are none.
    """
    if not stats:
        return [Step(seconds, running)]
    reported = len(stats.time_to_first_tokens_iter) + len(stats.inter_token_latencies_iter)
    rows = max(1, running, reported)  # requests whose round has ended are not running
    count = max(1, round(stats.num_generation_tokens / rows))
    tokens, rest = divmod(stats.num_generation_tokens, count)
    steps = [Step(seconds / count, rows, tokens + (number < rest)) for number in range(count)]
    prompts = stats.prompt_token_stats
    steps[0].prefilled, steps[0].reused = prompts.computed, prompts.cached_tokens
    return steps


def node_command(settings: GeneratorSettings) -> list[str]:
    """The command of a node that computes for the generator of node 0, with equal arguments."""
    arguments = _arguments(settings, _shape(settings))
    model = arguments.pop("model")
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--headless"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *value]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _shape(settings: GeneratorSettings) -> Shape:
    dtype = "float32" if current_platform.is_cpu() else "bfloat16"
    dtype = settings.vllm_options.get("dtype", dtype)
    stored = settings.vllm_options.get("kv_cache_dtype", "auto")
    shape = Shape.read(settings.model_directory, dtype, dtype if stored == "auto" else stored)
    return replace(shape, context_tokens=settings.context_of(shape.context_tokens))


def _arguments(settings: GeneratorSettings, shape: Shape) -> dict[str, Any]:
    """vLLM's engine arguments; `vllm_options` override the others."""
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(settings.model_directory),
        "dtype": shape.dtype,
        "max_model_len": shape.context_tokens,
        "max_num_seqs": settings.max_candidates,
        "max_num_batched_tokens": batched_tokens(settings.max_candidates),
        # Every block holds all layers: where some have a window, vLLM would store a text in several
        # blocks, and slots would not be tokens.
        "disable_hybrid_kv_cache_manager": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "gpu_memory_utilization": settings.memory_fraction,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": [f"{vllm_draw.__name__}:{vllm_draw.KeyedDraws.__name__}"],
        "scheduler_cls": "generator_service.stock.vllm_scheduler.scheduler",
        "kv_transfer_config": {
            "kv_connector": vllm_prompts.SharedPrompts.__name__,
            "kv_connector_module_path": vllm_prompts.__name__,
            "kv_role": "kv_both",
        },
        **_adapter_arguments(settings.adapters),
        **({"block_size": BLOCK_TOKENS["cpu"]} if on_cpu else {}),
        **settings.vllm_options,
    }
    if settings.kv_slots:
        arguments |= _capacity(settings.kv_slots, arguments, shape, on_cpu=on_cpu)
    return arguments


def _adapter_arguments(adapters: Mapping[str, Path]) -> dict[str, Any]:
    """All adapters stay loaded, at the highest rank among them, and one place stays empty: on CPUs
    vLLM adds the product of the last place to rows without an adapter."""
    if not adapters:
        return {}
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in adapters.values()]
    return {
        "enable_lora": True,
        "max_loras": len(configs) + 1,
        # vLLM accepts some ranks only, the powers of two among them.
        "max_lora_rank": max(8, 1 << (max(config["r"] for config in configs) - 1).bit_length()),
    }


def _capacity(
    slots: int, arguments: dict[str, Any], shape: Shape, *, on_cpu: bool
) -> dict[str, Any]:
    """Engine arguments for so many slots in whole blocks; texts cannot be longer than that."""
    block = arguments.setdefault("block_size", BLOCK_TOKENS["cuda"])
    blocks = slots // block + SPARE_BLOCKS
    longest = min(arguments["max_model_len"], (blocks - 1) * block)
    capacity: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": longest}
    if on_cpu:
        capacity["kv_cache_memory_bytes"] = blocks * block * shape.slot_bytes
    return capacity
