"""The memory of a generator: weights, the workspace of a step, and what is left for KV slots.

The own engine reserves memory by `Budget` when it starts; `specrej plan` computes the same from a
model's config alone, without weights or a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

from pydantic import ByteSize, TypeAdapter
from rich.console import Console
from rich.table import Table

from generator_service.admission import SPARE_BLOCKS, Blocks, Demand, own_slots
from generator_service.settings import GeneratorSettings
from specrej.contracts.validation import MAX_BATCH
from specrej_models import hub
from specrej_models.sizes import CPU_COLUMNS, SCORE_BYTES, SCORES_AT_ONCE, ModelSizes
from specrej_models.vllm_options import BLOCK_TOKENS

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_GIB = 1 << 30

_DTYPE_BYTES = {"cpu": 4, "cuda": 2}
_USUAL_PROMPT, _USUAL_ANSWER = 1024, 512  # tokens
_WORKSPACE_SHARE = 1 / 8  # of what the weights leave

PROMPTS, ANSWERS = (128, 1024, 8192), (128, 512, 2048)  # of the plan's table


def batched_tokens(max_candidates: int) -> int:
    """Tokens of a step in vLLM, which must not be fewer than its candidates."""
    return max(2048, max_candidates)  # vLLM's default


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory and limits of a generator on one device; several devices are all alike.

    sizes: of the device's part of the model; usable_bytes: for weights, workspace and KV; device:
    "cpu" (float32) or "cuda" (two bytes); threads: of compiled attention, 0: torch's operations.
    """

    sizes: ModelSizes
    weight_bytes: int
    usable_bytes: int
    context_tokens: int
    max_candidates: int
    prefill_chunk: int
    device: str
    is_vllm: bool = False
    threads: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.sizes.slot_bytes(_DTYPE_BYTES[self.device])

    @property
    def workspace_bytes(self) -> int:
        """Most that one step allocates for a moment: activations, scores, logits, sampling; for
        vLLM an estimate, since vLLM measures it at start.

        The largest step has `max_candidates` rows and `prefill_chunk` tokens of a prompt. The sum
        is of the tensors that live at once in the widest places of a layer and after the last one.
        """
        sizes, rows, chunk = self.sizes, self.max_candidates, self.prefill_chunk
        of_row, scores, logprobs = sizes.heads * self.context_tokens, 0, 0
        if self.is_vllm:  # its kernels store no scores, and it has log-probabilities of all logits
            chunk, logprobs = batched_tokens(rows) - rows, rows * sizes.vocabulary * 4
        elif self.threads:  # each holds one share's scores of all tokens
            scores = self.threads * 4 * CPU_COLUMNS * self.context_tokens
        else:
            scores = SCORE_BYTES * min(max(rows, chunk) * of_row, max(SCORES_AT_ONCE, of_row))
        # Queries, their rotated halves and two orders of them, keys, values, parts of the output.
        attention = 8 * sizes.heads * sizes.head_dim
        widest = 4 * sizes.hidden + max(attention, 4 * sizes.intermediate)
        layer = (rows + chunk) * widest * _DTYPE_BYTES[self.device]
        logits = (rows + 1) * sizes.vocabulary * (_DTYPE_BYTES[self.device] + 4)
        return logprobs + max(layer + scores, logits + sizes.sampling_bytes(rows, self.device))

    @property
    def slots(self) -> int:
        """Slots that candidates and prompts may hold; in vLLM whole blocks."""
        room = max(0, self.usable_bytes - self.weight_bytes - self.workspace_bytes)
        if not self.is_vllm:
            return room // self.slot_bytes
        block = BLOCK_TOKENS[self.device]
        return max(0, room // (block * self.slot_bytes) - SPARE_BLOCKS) * block

    def max_candidates_within(self, prompt_tokens: int, first_tokens: int, max_tokens: int) -> int:
        """Candidates that the slots hold at their first decision token; 0: no answer fits."""
        if prompt_tokens + max_tokens > self.context_tokens:
            return 0
        blocks = Blocks(BLOCK_TOKENS[self.device], prompt_tokens)
        vllm, own = (blocks.shared, blocks.own), (prompt_tokens, own_slots)
        shared, slots_of = vllm if self.is_vllm else own
        demand = Demand(0, shared, first_tokens, max_tokens, slots_of)
        return demand.max_candidates_within(self.slots - shared)

    def most_candidates(self, prompt_tokens: int, first_tokens: int, max_tokens: int) -> int:
        """The largest `max_candidates` for which the memory is enough: each takes workspace."""

        def is_too_many(n: int) -> bool:
            planned = replace(self, max_candidates=n)
            return planned.max_candidates_within(prompt_tokens, first_tokens, max_tokens) < n

        return bisect(range(1, MAX_BATCH + 1), False, key=is_too_many)

    def fitted(self, first_tokens: int) -> Self:
        """A copy with the largest power of two as max_candidates that can start together after a
        usual prompt with little workspace; its context is at most what the slots hold.

        Raises:
            ValueError: not even one candidate fits.
        """
        prompt = min(_USUAL_PROMPT, self.context_tokens // 2)
        most = self.most_candidates(prompt, first_tokens, min(_USUAL_ANSWER, prompt))
        if not most:
            usable, weights = self.usable_bytes / _GIB, self.weight_bytes / _GIB
            raise ValueError(
                f"does not fit: {usable:.1f} GiB less {weights:.1f} GiB of weights and the"
                f" workspace are {replace(self, max_candidates=1).slots} slots"
            )
        powers = [replace(self, max_candidates=1 << power) for power in range(most.bit_length())]
        more_bytes = _WORKSPACE_SHARE * (self.usable_bytes - self.weight_bytes)
        bound = powers[0].workspace_bytes + more_bytes
        planned = next(one for one in reversed(powers) if one.workspace_bytes <= bound)
        # vLLM does not start with a context that exceeds its slots, of which this is an estimate.
        most_tokens = planned.slots * 9 // 10 if self.is_vllm else planned.slots
        return replace(planned, context_tokens=min(self.context_tokens, most_tokens))


def host_memory() -> tuple[int, int]:
    """Available and total bytes; in a container with a limit, the limit is the total, of which its
    other processes may use a part."""
    machine = _read_numbers(_MEMINFO)
    free, total = machine["MemAvailable:"] * 1024, machine["MemTotal:"] * 1024
    file = _CGROUP / "memory.max"
    limit = file.read_text().strip() if file.is_file() else "max"
    if limit == "max":
        return free, total
    cached = _read_numbers(_CGROUP / "memory.stat")["inactive_file"]  # which the kernel can free
    used = int((_CGROUP / "memory.current").read_text()) - cached
    return min(free, int(limit) - used), min(total, int(limit))


def _read_numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}


def num_parameters(config: Any) -> int:
    """Weights of a model of transformers, which allocates no memory for them here."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(parameters: int, config: Any, device: str, devices: int, *, is_vllm: bool) -> int:
    """Bytes of weights on each device. The own engine on CPUs keeps a tied embedding twice."""
    if device == "cpu" and not is_vllm and config.tie_word_embeddings:
        parameters += config.hidden_size * config.vocab_size
    return _DTYPE_BYTES[device] * -(-parameters // devices)


def main(arguments: Sequence[str] | None = None) -> None:
    """`specrej plan`: slots, N and settings from a model's config alone.

    Raises:
        SystemExit: bad usage, or a model that does not fit.
    """
    parser = argparse.ArgumentParser(
        prog="specrej plan", description="Slots, N and settings from a config.json"
    )
    add = parser.add_argument
    text = "directory of a model, its config.json, or a name of a hub such as org/name@revision"
    add("--model", type=read_config, required=True, metavar="MODEL", help=text)
    text = "of each device: 80GiB, 80GB or bytes"
    add("--memory", type=TypeAdapter(ByteSize).validate_python, required=True, help=text)
    text = "share of it for the generator, 0 .. 0.95"
    add("--memory-fraction", type=float, default=0.9, help=text)
    text = "bfloat16 on GPUs, float32 on CPUs"
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=text)
    add("--engine", choices=("auto", "own", "vllm"), default="auto", help="as the setting engine")
    text = "devices over which each layer is divided"
    add("--tensor-parallel", type=int, default=1, help=text)
    add("--context-tokens", type=int, default=0, help="0: the model's, if it fits")
    add("--first", type=int, default=16, help="the first decision token")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        result = _plan(given)
    except ValueError as error:
        parser.exit(1, f"specrej: {error}\n")
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)


def _plan(given: argparse.Namespace) -> dict[str, Any]:
    """The plan in JSON types."""
    config, devices, first = given.model, given.tensor_parallel, given.first
    fraction, device = given.memory_fraction, "cuda" if given.dtype == "bfloat16" else "cpu"
    if not 0 <= fraction <= 0.95:
        raise ValueError(f"--memory-fraction must be 0 .. 0.95, is {fraction}")
    if min(devices, first) < 1:
        raise ValueError("--tensor-parallel and --first must be at least 1")
    if given.engine == "own" and devices > 1:
        raise ValueError("the own engine uses one device: --tensor-parallel is for vLLM")
    is_vllm = given.engine == "vllm" or (given.engine, device) == ("auto", "cuda") or devices > 1
    if not is_vllm:
        from specrej_models.model import bound_positions

        bound_positions(config)
    whole, parameters = ModelSizes.of(config), num_parameters(config)
    settings = GeneratorSettings(context_tokens=given.context_tokens)
    planned = Budget(
        whole.split(devices),
        weight_bytes(parameters, config, device, devices, is_vllm=is_vllm),
        int(given.memory * fraction),
        settings.context_of(whole.context_tokens),
        settings.max_candidates,
        settings.prefill_chunk,
        device,
        is_vllm,
        (os.cpu_count() or 1) if device == "cpu" else 0,
    ).fitted(first)
    is_shorter = planned.context_tokens < whole.context_tokens
    chosen = {
        "GENERATOR_ENGINE": "vllm" if is_vllm else "own",
        "GENERATOR_MEMORY_FRACTION": f"{fraction:g}",
        "GENERATOR_MAX_CANDIDATES": f"{planned.max_candidates}",
        "GENERATOR_CONTEXT_TOKENS": f"{planned.context_tokens if is_shorter else 0}",
        "REWARD_MAX_BATCH": f"{planned.max_candidates}",
    }
    if devices > 1:
        chosen["GENERATOR_VLLM_OPTIONS"] = json.dumps({"tensor_parallel_size": devices})
    facts = ("usable_bytes", "slot_bytes", "weight_bytes", "workspace_bytes", "slots")
    return {
        "parameters": parameters,
        **{name: getattr(planned, name) for name in facts},
        "first_decision_token": first,
        "n": [_n_of(planned, first, *lengths) for lengths in product(PROMPTS, ANSWERS)],
        "settings": {f"SPECREJ_{name}": value for name, value in chosen.items()},
    }


def _n_of(planned: Budget, first: int, prompt: int, answer: int) -> dict[str, int]:
    """The most candidates after a prompt of so many tokens, by algorithm."""
    return {
        "prompt_tokens": prompt,
        "max_tokens": answer,
        "best_of_n": planned.most_candidates(prompt, answer, answer),
        "speculative_rejection": planned.most_candidates(prompt, min(first, answer), answer),
    }


def _show(result: Mapping[str, Any]) -> None:
    """Print facts, N by lengths, settings and notes."""
    console, facts = Console(), Table.grid(padding=(0, 2))
    usable, weights, workspace = (
        f"{result[f'{part}_bytes'] / _GIB:.1f} GiB" for part in ("usable", "weight", "workspace")
    )
    facts.add_row("model", f"{result['parameters'] / 1e9:.2f} G weights")
    facts.add_row("each device", f"{usable}: weights {weights}, workspace {workspace}, KV the rest")
    facts.add_row("slot", f"{result['slot_bytes']:,} bytes on each device")
    facts.add_row("slots", f"{result['slots']:,}")
    first = result["first_decision_token"]
    table = Table("prompt", "answer", "Best-of-N", f"Speculative Rejection, first {first}")
    for row in result["n"]:
        table.add_row(*(f"{number:,}" for number in row.values()))
    console.print(facts, table)
    for name, value in result["settings"].items():
        console.print(f"{name}={value}", soft_wrap=True, highlight=False)
    if result["settings"]["SPECREJ_GENERATOR_ENGINE"] == "vllm":
        console.print("vLLM's workspace is an estimate: it measures its own, and adds CUDA graphs")


def read_config(place: str | Path) -> Any:
    """The config of a model's text part, from its directory, its config.json or its hub."""
    from transformers import AutoConfig

    try:
        if not Path(place).exists():
            if not hub.is_name(str(place)):
                raise OSError("no directory, config.json or name such as org/name@revision")
            place = hub.config_of(str(place))
        return AutoConfig.from_pretrained(place, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{place}: {error}") from None


if __name__ == "__main__":
    main()
