"""Decode throughput of the engine against transformers `generate`: `python -m benchmarks.decode`.

Same weights, prompt length, N, number of new tokens and sampling; interleaved, the median of the
rounds. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.engine import generate
from benchmarks.machine import describe_machine
from generator_service.engine import Engine
from generator_service.model import CausalLM


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    prompt_ids = [1 + 37 * i % 40_000 for i in range(arguments.prompt)]
    ours = _engine(arguments, prompt_ids)
    theirs = _transformers(arguments, prompt_ids)
    made = arguments.n * arguments.new
    speeds: dict[str, list[float]] = {"specrej": [], "transformers": []}
    for number in range(arguments.rounds + 1):
        for name, run in (("specrej", ours), ("transformers", theirs)):
            began = time.perf_counter()
            run()
            if number:  # the first round warms up
                speeds[name].append(made / (time.perf_counter() - began))
    _report(arguments, speeds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--n", type=int, default=64, help="candidates")
    parser.add_argument("--prompt", type=int, default=40, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens per candidate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def _engine(arguments: argparse.Namespace, prompt_ids: list[int]) -> Callable[[], None]:
    """A run of one session to its end, without cuts."""
    engine = Engine(
        CausalLM.load(arguments.model, "cpu"), arguments.n * arguments.new + arguments.prompt
    )
    engine.start()
    return lambda: generate(engine, prompt_ids, arguments.n, arguments.new)


def _transformers(arguments: argparse.Namespace, prompt_ids: list[int]) -> Callable[[], None]:
    """The same work by `generate` with num_return_sequences."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=arguments.new,
        num_return_sequences=arguments.n,
        eos_token_id=None,
        pad_token_id=0,
    )
    # generate() fills what its config leaves out, the end token among it, from the model's own.
    model.generation_config = config
    input_ids = torch.tensor([prompt_ids])
    mask = torch.ones_like(input_ids)

    def run() -> None:
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=mask, generation_config=config)
        assert output.shape == (arguments.n, arguments.prompt + arguments.new)

    return run


def _report(arguments: argparse.Namespace, speeds: dict[str, list[float]]) -> None:
    ours, theirs = (statistics.median(speeds[name]) for name in ("specrej", "transformers"))
    table = Table(
        title=f"decode, N={arguments.n}, prompt {arguments.prompt}, {arguments.new} new tokens"
    )
    for heading in ("engine", "tokens/s (median)", "rounds"):
        table.add_column(heading)
    for name, values in speeds.items():
        table.add_row(
            name, f"{statistics.median(values):.0f}", " ".join(f"{value:.0f}" for value in values)
        )
    Console(width=100).print(table)
    print(f"ratio {ours / theirs:.2f}")
    result = {
        "tokens_per_s": round(ours, 1),
        "transformers_tokens_per_s": round(theirs, 1),
        "ratio": round(ours / theirs, 3),
        "rounds": {name: [round(value, 1) for value in values] for name, values in speeds.items()},
        "n": arguments.n,
        "prompt_tokens": arguments.prompt,
        "new_tokens": arguments.new,
        "threads": arguments.threads,
        **describe_machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
