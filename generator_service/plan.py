"""`specrej plan`: slots, N and settings for a model on a device, without weights or a GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from generator_service.capacity import Capacity, reader, weight_bytes
from generator_service.settings import GeneratorSettings
from specrej_models.sizes import ModelSizes, Read, num_parameters

PROMPTS, ANSWERS = (128, 1024, 8192), (128, 512, 2048)
_UNITS = {"": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """`80GiB`, `80GB` or a number of bytes."""
    match = re.fullmatch(r"([0-9.]+) ?([KMGT]i?B|)", text)
    try:
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: use 80GiB, 80GB or a number of bytes")


def read_config(place: str | Path) -> dict[str, Any]:
    """The config.json of a model's directory, or that file."""
    path = Path(place)
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{path}: must be a JSON object")
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute bytes per slot, slots, N and settings from a model's config alone.

    Raises:
        SystemExit: bad usage, or a model that does not fit.
    """
    given = _parser().parse_args(arguments)
    try:
        planned, parameters = _plan(given)
        result = {"parameters": parameters} | _described(planned, given.first)
    except ValueError as error:
        print(f"specrej: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    read, fraction, devices = reader(given.model), given.memory_fraction, given.tensor_parallel
    whole = ModelSizes.of(read)
    result["settings"] = _settings(planned, fraction, whole.context_tokens, devices)
    result["notes"] = _notes(given.model, read, is_vllm=planned.is_vllm)
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result, planned)


def _plan(given: argparse.Namespace) -> tuple[Capacity, int]:
    """The capacity of each device, and the number of the model's weights."""
    read, devices = reader(given.model), given.tensor_parallel
    whole, settings = ModelSizes.of(read), GeneratorSettings(context_tokens=given.context_tokens)
    if given.engine == "own" and devices > 1:
        raise ValueError("the own engine uses one device: --tensor-parallel is for vLLM")
    device = "cuda" if given.dtype == "bfloat16" else "cpu"
    is_vllm = given.engine == "vllm" or (given.engine, device) == ("auto", "cuda") or devices > 1
    planned = Capacity(
        whole.split(devices),
        weight_bytes(read, device, devices, is_vllm=is_vllm),
        int(given.memory * given.memory_fraction),
        settings.context_of(whole.context_tokens),
        settings.max_candidates,
        settings.prefill_chunk,
        device,
        is_vllm,
        settings.threads or os.cpu_count() or 1,
    ).fitted(given.first)
    return planned, num_parameters(read)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej plan",
        description="Compute bytes per slot, slots, N and settings from a model's config alone.",
    )
    add = parser.add_argument
    text = "directory of a model, or its config.json"
    add("--model", type=read_config, required=True, metavar="PATH", help=text)
    add("--memory", type=parse_bytes, required=True, metavar="BYTES", help="of each device")
    text = "share of it for the generator, 0 .. 0.95"
    add("--memory-fraction", type=_fraction, default=0.9, help=text)
    text = "bfloat16 on GPUs, float32 on CPUs"
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=text)
    add("--engine", choices=("auto", "own", "vllm"), default="auto", help="as the setting engine")
    text = "devices over which each layer is divided"
    add("--tensor-parallel", type=_at_least(1), default=1, help=text)
    add("--context-tokens", type=_at_least(0), default=0, help="0: the model's, if it fits")
    add("--first", type=_at_least(1), default=16, help="the first decision token")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _fraction(text: str) -> float:
    if not 0 <= (fraction := float(text)) <= 0.95:
        raise argparse.ArgumentTypeError(f"{text!r}: use 0 .. 0.95")
    return fraction


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: use {least} or more")
        return number

    return parse


def _described(planned: Capacity, first: int) -> dict[str, Any]:
    """The plan in JSON types."""

    def numbers(prompt: int, answer: int) -> dict[str, int]:
        cut = min(first, answer)
        return {
            "prompt_tokens": prompt,
            "max_tokens": answer,
            "best_of_n": planned.most_candidates(prompt, answer, answer),
            "speculative_rejection": planned.most_candidates(prompt, cut, answer),
        }

    return {
        "slot_bytes": planned.slot_bytes,
        "weight_bytes": planned.weight_bytes,
        "workspace_bytes": planned.workspace_bytes,
        "slots": planned.slots,
        "first_decision_token": first,
        "n": [numbers(prompt, answer) for prompt in PROMPTS for answer in ANSWERS],
    }


def _settings(
    planned: Capacity, memory_fraction: float, context: int, devices: int
) -> dict[str, str]:
    """Environment variables; `context`: the model's."""
    shorter = planned.context_tokens < context
    chosen = {
        "GENERATOR_ENGINE": "vllm" if planned.is_vllm else "own",
        "GENERATOR_MEMORY_FRACTION": f"{memory_fraction:g}",
        "GENERATOR_KV_SLOTS": "0",  # the engine measures what is free when it starts
        "GENERATOR_MAX_CANDIDATES": f"{planned.max_candidates}",
        "GENERATOR_CONTEXT_TOKENS": f"{planned.context_tokens if shorter else 0}",
        "REWARD_MAX_BATCH": f"{planned.max_candidates}",
    }
    if devices > 1:
        chosen["GENERATOR_VLLM_OPTIONS"] = json.dumps({"tensor_parallel_size": devices})
    return {f"SPECREJ_{name}": value for name, value in chosen.items()}


def _notes(config: Mapping[str, Any], read: Read, *, is_vllm: bool) -> list[str]:
    notes = []
    if read("sliding_window", None) and read("use_sliding_window", True):
        notes.append("layers with a sliding window hold all tokens: their slots are full ones")
    if "vision_config" in config:
        notes.append("the weights are those of the text model alone")
    if "quantization_config" in config:
        notes.append("the weights are counted without quantisation")
    if is_vllm:
        notes.append("vLLM's workspace is an estimate: it measures its own, and adds CUDA graphs")
    return notes


def _show(result: Mapping[str, Any], planned: Capacity) -> None:
    """Print facts, N by lengths, settings and notes."""
    console, facts = Console(), Table.grid(padding=(0, 2))
    usable, weights, workspace = (
        f"{size / (1 << 30):.1f} GiB"
        for size in (planned.usable_bytes, planned.weight_bytes, planned.workspace_bytes)
    )
    facts.add_row("model", f"{result['parameters'] / 1e9:.2f} G weights")
    facts.add_row("each device", f"{usable}: weights {weights}, workspace {workspace}, KV the rest")
    facts.add_row("slot", f"{planned.slot_bytes:,} bytes on each device")
    facts.add_row("slots", f"{planned.slots:,}")
    first = result["first_decision_token"]
    table = Table("prompt", "answer", "Best-of-N", f"Speculative Rejection, first {first}")
    for row in result["n"]:
        table.add_row(*(f"{number:,}" for number in row.values()))
    console.print(facts, table)
    for name, value in result["settings"].items():
        console.print(f"{name}={value}", soft_wrap=True, highlight=False)
    for text in result["notes"]:
        console.print(f"note: {text}", soft_wrap=True, style="dim")


if __name__ == "__main__":
    main()
