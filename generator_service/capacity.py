"""Slots and candidates that fit a device, by a model's config alone; standard library only.

The formulas are those by which the engines reserve memory and admit sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from generator_service.admission import SPARE_BLOCKS, Blocks, Demand, own_slots
from specrej.contracts.limits import MAX_BATCH
from specrej_models.sizes import (
    ARCHITECTURES,
    ModelSizes,
    Read,
    cpu_score_bytes,
    num_parameters,
)
from specrej_models.vllm_options import BLOCK_TOKENS

_VLLM_BATCHED_TOKENS = 2048  # vLLM's default
_USUAL_PROMPT, _USUAL_ANSWER = 1024, 512  # tokens
_WORKSPACE_SHARE = 1 / 8  # of what the weights leave
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def batched_tokens(max_candidates: int) -> int:
    """Tokens of a step in vLLM, which must not be fewer than its candidates."""
    return max(_VLLM_BATCHED_TOKENS, max_candidates)


def reader(config: Mapping[str, Any]) -> Read:
    """A reader of the text part of a config.json, with the defaults of its model type.

    Raises:
        ValueError: a field is missing.
    """
    text = config.get("text_config") or config
    architecture = ARCHITECTURES.get(text.get("model_type", ""))
    known = {**(architecture.defaults if architecture else {}), **text}
    for name in (*_NEEDED, "max_position_embeddings"):
        if not known.get(name):
            raise ValueError(f"the config has no {name}")
    return known.get


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory and limits of a generator on one device; several devices are all alike.

    sizes: of the device's part of the model; usable_bytes: for weights, workspace and KV; device:
    "cpu" or "cuda"; threads: of the own engine on CPUs.
    """

    sizes: ModelSizes
    weight_bytes: int
    usable_bytes: int
    context_tokens: int
    max_candidates: int
    prefill_chunk: int
    device: str
    is_vllm: bool
    threads: int

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.device == "cpu" else 2

    @property
    def slot_bytes(self) -> int:
        return self.sizes.slot_bytes(self.dtype_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that one step allocates; for vLLM an estimate, since vLLM measures it at start."""
        rows, chunk, scores, logprobs = self.max_candidates, self.prefill_chunk, 0, 0
        if self.is_vllm:  # its kernels store no scores, and it has log-probabilities of all logits
            chunk, logprobs = batched_tokens(rows) - rows, rows * self.sizes.vocabulary * 4
        elif self.device == "cpu":
            scores = cpu_score_bytes(self.threads, self.context_tokens)
        else:
            scores = self.sizes.torch_score_bytes(max(rows, chunk), self.context_tokens)
        sizes, dtype_bytes = self.sizes, self.dtype_bytes
        return logprobs + sizes.workspace_bytes(dtype_bytes, rows, chunk, scores, self.device)

    @property
    def slots(self) -> int:
        """Slots that candidates and prompts may hold; in vLLM whole blocks."""
        room = max(0, self.usable_bytes - self.weight_bytes - self.workspace_bytes)
        if not self.is_vllm:
            return room // self.slot_bytes
        block = BLOCK_TOKENS[self.device]
        return max(0, room // (block * self.slot_bytes) - SPARE_BLOCKS) * block

    def max_candidates_within(self, prompt_tokens: int, first_tokens: int, max_tokens: int) -> int:
        """Candidates that the slots hold at their first decision token; 0: no whole answer fits."""
        if prompt_tokens + max_tokens > self.context_tokens:
            return 0
        blocks = Blocks(BLOCK_TOKENS[self.device], prompt_tokens)
        shared, slots_of = prompt_tokens, own_slots
        if self.is_vllm:
            shared, slots_of = blocks.shared, blocks.own
        demand = Demand(0, shared, first_tokens, max_tokens, slots_of)
        return demand.max_candidates_within(self.slots - shared)

    def most_candidates(self, prompt_tokens: int, first_tokens: int, max_tokens: int) -> int:
        """The largest `max_candidates` for which the memory is enough: each takes workspace."""
        few, many = 0, MAX_BATCH + 1
        while many - few > 1:
            middle = (few + many) // 2
            planned = replace(self, max_candidates=middle)
            fits = planned.max_candidates_within(prompt_tokens, first_tokens, max_tokens) >= middle
            few, many = (middle, many) if fits else (few, middle)
        return few

    def fitted(self, first_tokens: int) -> Self:
        """A copy with the largest power of two as max_candidates that can start together after a
        usual prompt with little workspace; its context is at most what the slots hold.

        Raises:
            ValueError: not even one candidate fits.
        """
        prompt = min(_USUAL_PROMPT, self.context_tokens // 2)
        most = self.most_candidates(prompt, first_tokens, min(_USUAL_ANSWER, prompt))
        planned, room = replace(self, max_candidates=1), self.usable_bytes - self.weight_bytes
        if not most:
            raise ValueError(
                f"does not fit: {self.usable_bytes / (1 << 30):.1f} GiB less "
                f"{self.weight_bytes / (1 << 30):.1f} GiB of weights and the workspace are "
                f"{planned.slots} slots"
            )
        least = planned.workspace_bytes
        while 2 * planned.max_candidates <= most:
            more = replace(planned, max_candidates=2 * planned.max_candidates)
            if more.workspace_bytes - least > _WORKSPACE_SHARE * room:
                break
            planned = more
        # vLLM does not start with a context that exceeds its slots, of which this is an estimate.
        most_tokens = planned.slots * 9 // 10 if self.is_vllm else planned.slots
        return replace(planned, context_tokens=min(self.context_tokens, most_tokens))


def weight_bytes(read: Read, device: str, devices: int, *, is_vllm: bool) -> int:
    """Bytes of weights on each device. The own engine on CPUs keeps a tied embedding twice.

    Raises:
        ValueError: the architecture is unknown, or cannot be divided.
    """
    count = num_parameters(read, devices)
    if device == "cuda":
        return 2 * count
    if is_vllm:
        return 4 * count
    sizes = ModelSizes.of(read)
    tied = sizes.hidden * sizes.vocabulary if read("tie_word_embeddings", False) else 0
    return 4 * (count + tied)
