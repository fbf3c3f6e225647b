"""Checks the generator on this machine's accelerator: `make gpu-check`.

For machines with CUDA and vLLM. Without CUDA it runs a small model on vLLM's CPU build, which
tests the checks themselves. It writes gpu-check.json:

* conformance: the generators' tests on vLLM, and on CUDA those of the own engine and of rewards;
* agreement: greedy tokens and log-probabilities of a small model on both engines, against the own
  engine in float32 on the processor; on CUDA those drawn by the own engine there, too;
* speed, with random weights in the shape of a model: tokens per second, the time of a prune of half
  of the candidates, and the same tokens by calls of vLLM alone, one request with n = N, by turns,
  whole and with cuts to a half at a quarter and at a half of the tokens, with the processor time of
  this process and vLLM's together, per step;
* load: answers per second of sessions at the same time, with these cuts and without;
* by_memory: the rounds of a session whose N the slots decide.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import LlamaConfig

from benchmarks.harness import log, parse_arguments, provenance, report
from generator_service.settings import GeneratorSettings
from generator_service.stock.generator import StockGenerator
from specrej.contracts import Prompt, Round, Sampling, SessionSpec
from specrej_models.vllm_options import prepare_environment
from tests.conformance.subjects import own, save_model, vllm
from tests.reward_service.tiny import make_tokenizer

ON_CUDA = torch.cuda.is_available()


# Of Llamas.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
SHAPES = {
    "small": (64, 128, 2, 4, 2, 32, 512, 1024),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49_152, 8192),
    "llama-3-8b": (4096, 14_336, 32, 32, 8, 128, 128_256, 8192),
}
_AGREEMENT, _AGREEMENT_TOKENS = "agreement", 48


def main() -> None:
    """Check, and write the file.

    Raises:
        SystemExit: with 1 if a test of the suite failed, or the suite did not end.
    """
    arguments = parse_arguments(
        __doc__,
        shape=("llama-3-8b" if ON_CUDA else "small", f"one of {', '.join(SHAPES)}"),
        n=([16, 64, 256, 1024] if ON_CUDA else [4, 16], "candidates"),
        prompt=(128, "tokens of the prompt"),
        new=(128 if ON_CUDA else 32, "new tokens per candidate"),
        rounds=(3, "turns of the verbs and of vLLM alone, whose medians are reported"),
        sessions=([1, 4, 16, 64], "sessions at the same time"),
        out=(Path("build/gpu-check"), "folder of the results"),
        skip_conformance=(False, "leave out the suite, which takes minutes"),
    )
    if arguments.new < 4:
        sys.exit("gpu-check: --new must be 4 or more")
    for name in (_AGREEMENT, arguments.shape):
        (arguments.out / name).mkdir(parents=True, exist_ok=True)
    save_model(arguments.out / _AGREEMENT)
    _save_shape(arguments.out / arguments.shape, SHAPES[arguments.shape])
    device = torch.cuda.get_device_name() if ON_CUDA else "cpu"
    result: dict[str, Any] = {"device": device, "shape": arguments.shape}
    result["conformance"] = None if arguments.skip_conformance else _conformance(arguments.out)
    try:
        asyncio.run(_measure(arguments, result))
    finally:  # a check that is interrupted keeps its figures
        text = json.dumps({**result, **provenance()}, indent=2)
        (arguments.out / "gpu-check.json").write_text(text + "\n")
    headings = ("N", "tokens/s", "step ms", "prune of half, ms", "of bare calls", "with cuts")
    report("vLLM behind the session verbs", headings, map(_row, result["speed"]), result)
    sys.exit(bool(result["conformance"] and result["conformance"]["exit_code"]))


def _conformance(out: Path) -> dict[str, Any]:
    """pytest's exit code and last lines; all of its output goes to a file."""
    log("conformance: some minutes")
    parts = ("generators", "sampling", "cuda")
    files = [f"tests/conformance/test_{part}.py" for part in parts]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", *files]
    file = out / "conformance.txt"
    with file.open("w") as stream:
        suite = [*command, "-k", "vllm or cuda"]
        ended = subprocess.run(suite, stdout=stream, stderr=subprocess.STDOUT, check=False)
    return {"last_lines": file.read_text().splitlines()[-12:], "exit_code": ended.returncode}


async def _measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    log("agreement with the own engine")
    result["agreement"] = await _agreement(arguments.out / _AGREEMENT)
    settings = GeneratorSettings(
        engine="vllm",
        model=str(arguments.out / arguments.shape),
        max_candidates=max(arguments.n),
        memory_fraction=0.9 if ON_CUDA else 0.2,
        vllm_options={"load_format": "dummy", "enforce_eager": not ON_CUDA},
        kv_slots=0 if ON_CUDA else max(arguments.n) * (arguments.prompt + arguments.new),
    )
    log(f"loading random weights in the shape of {arguments.shape}")
    prepare_environment(settings.threads)
    from generator_service.stock.vllm import load_vllm

    generator = load_vllm(settings, None)
    try:
        result |= {"speed": [], "load": []}
        for n in arguments.n:
            result["speed"].append(await _speed(generator, n, arguments))
        for sessions in arguments.sessions:
            result["load"].append(await _load(generator, sessions, arguments))
        result["by_memory"] = await _memory(generator, arguments)
    finally:
        await generator.close()


async def _agreement(directory: Path) -> list[dict[str, Any]]:
    """Shares of candidates with equal tokens, and the largest difference of log-probabilities
    before the first token that differs, of each engine here."""
    samplings = {
        "greedy": Sampling(_AGREEMENT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=True),
        "drawn": Sampling(_AGREEMENT_TOKENS, seed=5, ignore_eos=True, logprobs=True),
    }
    engines: dict[str, Any] = {"reference": own, "vllm": vllm}
    if ON_CUDA:
        engines["own"] = partial(own, device="cuda")
    rounds: dict[tuple[str, str], Round] = {}
    for engine, subject in engines.items():
        async with subject(directory) as started:
            for draws, sampling in samplings.items():
                n = 1 if draws == "greedy" else 8
                spec = SessionSpec(Prompt(text="Name three uses of a brick."), n, sampling, 1)
                async with started.generator.open(spec) as session:
                    rounds[engine, draws] = await session.extend(_AGREEMENT_TOKENS)
    return [
        {"engine": engine, "draws": draws, **_compared(rounds["reference", draws], made)}
        for (engine, draws), made in rounds.items()
        if engine != "reference" and (engine, draws) != ("vllm", "drawn")  # it has its own draws
    ]


def _compared(reference: Round, other: Round) -> dict[str, Any]:
    equal, largest = 0, 0.0
    for ours, theirs in zip(reference.candidates, other.candidates, strict=True):
        tokens = zip(ours.new_token_ids, theirs.new_token_ids, strict=True)
        same = next((at for at, (a, b) in enumerate(tokens) if a != b), len(ours.new_token_ids))
        equal += same == len(ours.new_token_ids)
        logprobs = zip(ours.new_logprobs[:same], theirs.new_logprobs[:same], strict=True)
        largest = max(largest, *(abs(a - b) for a, b in logprobs), 0.0)
    candidates = len(reference.candidates)
    return {"candidates": candidates, "equal": equal, "largest_difference": round(largest, 6)}


def _save_shape(directory: Path, shape: Sequence[int]) -> None:
    """Save a model without weights, with bytes as tokens."""
    sizes: dict[str, Any] = dict(zip(_SIZES, shape, strict=True))
    config = LlamaConfig(**sizes, eos_token_id=2, architectures=["LlamaForCausalLM"])
    config.save_pretrained(directory)
    make_tokenizer("<pad>").save_pretrained(directory)


def _plans(n: int, new: int) -> dict[str, list[tuple[int, int]]]:
    """Rows and tokens of each part of a session."""
    half, quarter = max(1, n // 2), max(1, n // 4)
    cut = [(n, new // 4), (half, new // 2 - new // 4), (quarter, new - new // 2)]
    return {"whole": [(n, new)], "cut": cut}


async def _speed(
    generator: StockGenerator, n: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Speed through the verbs, over that of vLLM alone, too, and processor time of both."""
    log(f"speed of N = {n}")
    ways, point, prune_s = {"verbs": _by_verbs, "bare": _by_calls}, dict[str, Any](n=n), 0.0
    for name, plan in _plans(n, arguments.new).items():
        measured: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(arguments.rounds):
            for way, run in ways.items():
                text = f"{number}{way}".ljust(arguments.prompt - 1, "y")  # no stored prompt
                began, used = time.perf_counter(), _processor_s()
                prune_s = await run(generator, text, plan) or prune_s
                measured[way].append((time.perf_counter() - began, _processor_s() - used))
        (ours_s, our_processor_s), (bare_s, bare_processor_s) = (
            map(statistics.median, zip(*measured[way], strict=True)) for way in ways
        )
        point[name] = {
            "tokens_per_s": round(sum(rows * count for rows, count in plan) / ours_s, 1),
            "step_ms": round(1e3 * ours_s / arguments.new, 2),
            "of_bare": round(bare_s / ours_s, 3),
            "processor_ms_per_step": round(1e3 * our_processor_s / arguments.new, 3),
            "bare_processor_ms_per_step": round(1e3 * bare_processor_s / arguments.new, 3),
        }
    whole = {name: point["whole"][name] for name in ("tokens_per_s", "step_ms")}
    return {**point, **whole, "prune_ms": round(1e3 * prune_s, 2)}


async def _by_verbs(
    generator: StockGenerator, prompt: str, plan: Sequence[tuple[int, int]]
) -> float:
    """A session that is cut to each part's rows; the seconds of its last prune."""
    sampling = Sampling(sum(count for _, count in plan), seed=1, ignore_eos=True)
    # As the bare calls, and as the requests whose rewards read texts only.
    begin = Prompt(text=prompt), plan[0][0], sampling, plan[0][1]
    spec = SessionSpec(*begin, without_likelihood=True)
    async with generator.open(spec) as session:
        reached, prune_s = 0, 0.0
        for rows, count in plan:
            if reached:
                began = time.perf_counter()
                await session.prune(range(rows))
                prune_s = time.perf_counter() - began
            reached += count
            await session.extend(reached)
    return prune_s


async def _by_calls(
    generator: StockGenerator, prompt: str, plan: Sequence[tuple[int, int]]
) -> None:
    """One request with n per part, all with the same prompt."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    requests: Any = generator.requests
    spec = SessionSpec(Prompt(text=prompt), 1, Sampling(1), 1)
    given = {"prompt_token_ids": [*(await generator.frontend.command(spec)).prompt_ids]}
    of_all = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    for rows, count in plan:
        params = vllm.SamplingParams(n=rows, max_tokens=count, ignore_eos=True, **of_all)
        async for _ in requests.llm.generate(given, params, f"bare-{time.monotonic_ns()}"):
            pass


def _processor_s() -> float:
    """Processor time of this process and its children so far."""
    us = psutil.Process()
    times = [one.cpu_times() for one in (us, *us.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def _load(
    generator: StockGenerator, sessions: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Answers per second of sessions at the same time, with cuts and without."""
    log(f"{sessions} sessions at the same time")
    n, point = arguments.n[0], dict[str, Any](sessions=sessions, n=arguments.n[0])
    for name, plan in _plans(n, arguments.new).items():
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                text = f"{number} of {name}".ljust(arguments.prompt - 1, "z")
                group.create_task(_by_verbs(generator, text, plan))
        point[f"{name}_answers_per_s"] = round(sessions / (time.perf_counter() - began), 3)
    return point


async def _memory(generator: StockGenerator, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A session whose N is left open, cut to a half whenever its slots are full."""
    log("a session whose N the slots decide")
    longest = (await generator.describe()).context_tokens - arguments.prompt
    sampling = Sampling(min(4 * arguments.new, longest), seed=1, ignore_eos=True)
    prompt, rounds, live = Prompt(text="m" * (arguments.prompt - 1)), list[dict[str, Any]](), [-1]
    async with generator.open(SessionSpec(prompt, 0, sampling, 1)) as session:
        while live:
            ended = await session.extend(sampling.max_tokens)
            live = [one.id for one in ended.candidates if one.finish is None]
            freed = (await session.prune(live[: -(-len(live) // 2)])).freed_slots
            round_ = {"tokens": ended.num_tokens, "ended_by": ended.ended_by.value}
            round_ |= {"candidates": len(ended.candidates), "slots": ended.slots.session}
            rounds.append({**round_, "freed": freed})
    return rounds


def _row(point: dict[str, Any]) -> Sequence[object]:
    shown = (point[name] for name in ("n", "tokens_per_s", "step_ms", "prune_ms"))
    return *shown, point["whole"]["of_bare"], point["cut"]["of_bare"]


if __name__ == "__main__":
    main()
