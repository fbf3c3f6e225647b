"""vLLM in this process, as the stock engine's program; by its public interfaces only.

Call `specrej_models.vllm_options.prepare_environment` before this module is imported.

A round is a request of vLLM's, whose prompt ends with a candidate's tokens so far. Its automatic
prefix cache keeps their keys and values in whole blocks, so a survivor computes at most one block
again per round. Draws are vLLM's, by a seed per request. Log-probabilities are vLLM's
`raw_logprobs`: temperature 1, the whole distribution. With them scheduling, input and output take
half as much again, in a batch with one row that needs its own the sampler, too, so it is not asked
for those that nobody reads. Then nothing shows logits that are not finite: vLLM draws token 0 from
them, with a structured output the first one that conforms. They usually stay so: at the end of a
session's first request, and of each that ends with token 0, a log-probability is looked at.
Structured outputs are vLLM's, too, by llguidance, after the generator has compiled and tried them.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import vllm
from transformers import AutoConfig
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from generator_service.admission import SPARE_BLOCKS
from generator_service.engine.commands import OnStep, OpenCommand, Top
from generator_service.engine.generator import Frontend
from generator_service.engine.sampling import LEAST_LOGPROB
from generator_service.engine.text import Text
from generator_service.loading import vllm_fingerprint
from generator_service.settings import GeneratorSettings
from generator_service.stock.generator import StockGenerator
from generator_service.stock.requests import Ask, Part, Places, structured_fields
from specrej import contracts as c
from specrej.contracts.errors import InternalError, Unavailable
from specrej_models.probe import check_tensors, examine
from specrej_models.sizes import ModelSizes
from specrej_models.vllm_images import PromptImages, takes_images
from specrej_models.vllm_options import BLOCK_TOKENS

log = logging.getLogger(__name__)

# Bytes of a number of vLLM's `dtype` ("auto" has two) or `kv_cache_dtype`; others have at most one.
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2}
# Fields of the sampling that vLLM's parameters have by the same names.
_SAME_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, from its configuration."""

    context_tokens: int
    vocabulary: int
    slot_bytes: int
    dtype: str


class VLLMRequests:
    """`Requests` on a running vLLM; its calls belong to the event loop of the first of them."""

    def __init__(self, llm: Any, end_ids: frozenset[int]) -> None:
        """llm: an `AsyncLLMEngine`."""
        self.llm = llm
        # What vLLM runs at once, so that none waits in its line, which knows no tenants.
        self._places = Places(llm.vllm_config.scheduler_config.max_num_seqs)
        self._is_closed = False
        self._end_ids = sorted(end_ids)
        self._names = map(str, itertools.count(1))
        self._num_running = 0
        self._last_part = 0.0  # time of the last part, or of the first request that runs

    async def generate(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """As `Requests.generate`."""
        command, params = ask.command, self._params(ask)
        num_prompt, made = len(command.prompt_ids) + len(ask.token_ids), [*ask.token_ids]
        begins = ask.candidate == command.first_id and not ask.token_ids
        async with self._places.take(ask.session, command.cache_salt):
            outputs = await self._outputs(command, made, params)
            if not self._num_running:
                self._last_part = time.monotonic()
            self._num_running += 1
            is_first = True
            try:
                async for output in outputs:
                    self._last_part = time.monotonic()
                    part = _part(output.outputs[0], command.sampling.top_logprobs)
                    if not ask.with_logprobs:
                        part.logprobs = [0.0] * len(part.token_ids)
                    made += part.token_ids
                    if part.finish and params.logprobs is None and (begins or made[-1:] == [0]):
                        one = SamplingParams(max_tokens=1, logprobs=0, flat_logprobs=True)
                        async for last in await self._outputs(command, made[:-1], one):
                            _part(last.outputs[0], 0)
                    if is_first:
                        part.prompt_tokens = num_prompt
                        part.cached_tokens = output.num_cached_tokens
                        is_first = False
                    yield part
            except (GeneratorExit, InternalError):
                raise
            except Exception as error:
                if self.llm.errored:
                    raise Unavailable("the engine is gone") from error
                log.exception("vLLM failed")
                raise InternalError("the generator's step failed") from error
            finally:
                self._num_running -= 1
                await outputs.aclose()

    async def _outputs(
        self, command: OpenCommand, made: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Any, None]:
        """A request of the tokens after those that a candidate has."""
        if command.images:
            prompt = await command.images.rendered(made)
        else:
            ids = [*command.prompt_ids, *made]
            prompt = tokens_input(ids, cache_salt=command.cache_salt or None)
        outputs: AsyncGenerator[Any, None] = self.llm.generate(prompt, params, next(self._names))
        return outputs

    def heartbeat_s(self) -> float:
        """Seconds since the last part while requests run; infinite if vLLM has ended."""
        if self._is_closed or self.llm.errored:
            return math.inf
        return time.monotonic() - self._last_part if self._num_running else 0.0

    async def close(self) -> None:
        """End vLLM's processes."""
        if not self._is_closed:
            self._is_closed = True
            self.llm.shutdown()

    def _params(self, ask: Ask) -> SamplingParams:
        sampling = ask.command.sampling
        output = sampling.structured_output
        ends = sampling.stop_token_ids
        return SamplingParams(
            **{name: getattr(sampling, name) for name in _SAME_FIELDS},
            seed=ask.seed,
            max_tokens=ask.count,
            min_tokens=min(ask.min_tokens, ask.count),
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(ends) if sampling.ignore_eos else [*ends, *self._end_ids],
            logit_bias={item.token_id: item.bias for item in sampling.logit_bias} or None,
            structured_outputs=output and StructuredOutputsParams(**structured_fields(output)),
            detokenize=False,
            logprobs=sampling.top_logprobs if ask.with_logprobs else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=ask.interval,
        )


def _part(output: Any, most: int) -> Part:
    """vLLM's output; of each token, its flat log-probabilities begin with those of the drawn one.

    Raises:
        InternalError: the request failed.
    """
    flat = output.logprobs
    starts = flat.start_indices if flat else ()
    logprobs = [flat.logprobs[start] for start in starts]
    if any(map(math.isnan, logprobs)):
        raise InternalError("the model's logits are not finite")
    if output.finish_reason not in (None, "stop", "length"):
        raise InternalError(f"vLLM ended a candidate by {output.finish_reason}")
    finish = c.FinishReason(output.finish_reason) if output.finish_reason else None
    top = [_top(flat, start, most) for start in starts] if most else ()
    return Part(output.token_ids, logprobs, top, finish=finish)


def _top(flat: Any, start: int, most: int) -> Top:
    """The most probable tokens: behind the drawn one, which may be among them."""
    best = slice(start + 1, start + 1 + most)
    return flat.token_ids[best], [max(one, LEAST_LOGPROB) for one in flat.logprobs[best]]


def load_vllm(settings: GeneratorSettings, on_step: OnStep | None = None) -> StockGenerator:
    """A generator on a vLLM that is started for it; takes a minute.

    Raises:
        Exception: any of vLLM's, if it cannot start.
    """
    if settings.vllm_options.get("load_format", "auto") in ("auto", "safetensors"):
        check_tensors(settings.files.directory, reads_quantized=True)
    examined = examine(
        settings.files.directory,
        tool_format=settings.tool_format,
        thinking_marks=settings.thinking_marks,
    )
    shape = _shape(settings)
    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**_arguments(settings, shape)))
    config = llm.vllm_config
    if "max_model_len" in settings.vllm_options:  # else a small kv_slots may have reduced it
        shape = replace(shape, context_tokens=config.model_config.max_model_len)
    block_tokens = config.cache_config.block_size
    capacity = (config.cache_config.num_gpu_blocks - SPARE_BLOCKS) * block_tokens
    device, template = current_platform.device_name, examined.template
    card = c.GeneratorDescription(
        model=settings.files.name,
        fingerprint=vllm_fingerprint(settings, shape.dtype, vllm.__version__),
        context_tokens=shape.context_tokens,
        max_candidates=settings.max_candidates,
        vocabulary=shape.vocabulary,
        slot_bytes=shape.slot_bytes,
        device=f"vllm {device} {shape.dtype}",
        slots=c.SlotGauge(capacity, 0, 0),
        auto_candidates=settings.auto_candidates_of(device),
        can_fork=True,
        form=c.CandidateForm.ROUNDS,
        flat_steps=not current_platform.is_cpu(),
        takes_images=takes_images(llm) and bool(template and template.takes_images),
    )

    async def read_images(
        prompt_ids: Sequence[int], images: Mapping[str, c.Image], cache_salt: str
    ) -> tuple[Sequence[int], PromptImages]:
        """A `ReadImages` by the model's processor in vLLM."""
        read = PromptImages(llm, images, cache_salt, prompt_ids)
        return await read.counted(), read

    return StockGenerator(
        VLLMRequests(llm, examined.end_ids),
        Frontend(Text.of(examined), card, read_images if card.takes_images else None),
        examined.end_ids,
        card,
        block_tokens=block_tokens,
        max_waiting=settings.max_waiting,
        on_step=on_step,
    )


def _shape(settings: GeneratorSettings) -> Shape:
    dtype = "float32" if current_platform.is_cpu() else "bfloat16"
    dtype = settings.vllm_options.get("dtype", dtype)
    stored = settings.vllm_options.get("kv_cache_dtype", "auto")
    config = AutoConfig.from_pretrained(settings.files.directory, local_files_only=True)
    sizes = ModelSizes.of(config.get_text_config())
    return Shape(
        context_tokens=settings.context_of(sizes.context_tokens),
        vocabulary=sizes.vocabulary,
        slot_bytes=sizes.slot_bytes(_BYTES.get(dtype if stored == "auto" else stored, 1)),
        dtype=dtype,
    )


def _arguments(settings: GeneratorSettings, shape: Shape) -> dict[str, Any]:
    """vLLM's engine arguments; `vllm_options` override the others."""
    # vLLM's default, but not fewer than there may be candidates.
    on_cpu, batched = current_platform.is_cpu(), max(2048, settings.max_candidates)
    arguments: dict[str, Any] = {
        "model": str(settings.files.directory),
        "dtype": shape.dtype,
        "max_model_len": shape.context_tokens,
        "max_num_seqs": settings.max_candidates,
        "max_num_batched_tokens": batched,
        # Every block holds all layers: where some have a window, vLLM would store a text in several
        # blocks, and slots would not be tokens.
        "disable_hybrid_kv_cache_manager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "gpu_memory_utilization": settings.memory_fraction,
        "logprobs_mode": "raw_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
        **(_cpu_arguments(shape, batched) if on_cpu else {}),
        **settings.vllm_options,
    }
    if settings.kv_slots:
        arguments |= _capacity(settings.kv_slots, arguments, shape, on_cpu=on_cpu)
    return arguments


def _cpu_arguments(shape: Shape, batched: int) -> dict[str, Any]:
    """Prompts are read whole: after a part of one, vLLM's CPU build takes back the draw of a seeded
    request, which generators on CPUs cannot (`set_offset`), and the engine ends."""
    return {
        "block_size": BLOCK_TOKENS["cpu"],
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(batched, shape.context_tokens),
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
