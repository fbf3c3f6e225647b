"""The engine on a GPU, on a model of Llama 3 8B's shape: `python -m benchmarks.gpu`.

Weights are random, made on the device. First the logits are compared with plain transformers',
after two cuts. Then each number of candidates is decoded in each mode, interleaved: `torch` (no
kernels of ours), `triton` (decode attention in Triton), `graphs` (that, recorded as CUDA graphs).
Last a whole run in which only full memory ends rounds and every second candidate is kept. Prints
a JSON line per case; the last line on stdout is one JSON object of all.

Needs neither grpc nor a model on disk. `--device cpu` with a small shape shows that it works; then
`triton` and `graphs` need Triton's interpreter, and a graph's replay is the step itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machine import describe_machine
from generator_service.engine import Engine, OpenCommand
from generator_service.model import CausalLM
from inference.attention import Segment
from specrej.contracts import Sampling

MODES = ("torch", "triton", "graphs")

# Largest difference of logits from plain transformers' in float32, where ours must be its equal.
_FLOAT32_TOLERANCE = 1e-3
# In 16 bits, what may be between our error and plain transformers', both against float32.
_ERROR_RATIO = 1.5

Result = dict[str, Any]


def main() -> int:
    """Check, measure, print; 1 if logits differ by more than rounding explains."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    network = _network(arguments, dtype)
    references = _references(network)
    models = {mode: _model(mode, network, max(arguments.n)) for mode in arguments.modes}
    ceilings = _ceilings(device, dtype)
    _print("ceilings", ceilings)
    checks = [
        _print("check", {"mode": mode, **_check(arguments, models[mode], references)})
        for mode in arguments.modes
    ]
    references.clear()
    cases = [
        _print("decode", {"mode": mode, "n": n, **_decode(arguments, models[mode], n, ceilings)})
        for n in arguments.n
        for mode in arguments.modes
    ]
    runs = [
        _print("run", {"mode": mode, **_run(arguments, models[mode])}) for mode in arguments.modes
    ]
    everything = {"ceilings": ceilings, "checks": checks, "decode": cases, "runs": runs}
    print(json.dumps({**everything, "arguments": vars(arguments), **_machine(device)}))
    return 0 if all(check["is_close"] for check in checks) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--check-n", type=int, default=64, help="candidates of the check")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--begin", type=int, default=64, help="candidates' tokens before timing")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of the whole run")
    parser.add_argument("--slots", type=int, default=0, help="of the whole run; 0: free memory")
    shape = parser.add_argument_group("shape of the model; Llama 3 8B's by default")
    shape.add_argument("--layers", type=int, default=32)
    shape.add_argument("--hidden", type=int, default=4096)
    shape.add_argument("--intermediate", type=int, default=14_336)
    shape.add_argument("--heads", type=int, default=32)
    shape.add_argument("--kv-heads", type=int, default=8)
    shape.add_argument("--vocabulary", type=int, default=128_256)
    return parser.parse_args()


def _print(kind: str, result: Result) -> Result:
    """What is printed: four digits say all there is to say."""
    result = {name: _short(value) for name, value in result.items()}
    print(json.dumps({"kind": kind, **result}), flush=True)
    return result


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


# Models


def _network(arguments: argparse.Namespace, dtype: torch.dtype) -> Any:
    """Plain transformers, random weights."""
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(arguments.device):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return network.eval().requires_grad_(False)


def _references(network: Any) -> list[Any]:
    """Plain transformers with the same weights: in the same precision, and in float32."""
    same = copy.deepcopy(network)
    return [same, same if same.dtype == torch.float32 else copy.deepcopy(network).float()]


def _model(mode: str, network: Any, max_rows: int) -> CausalLM:
    if mode == "torch":
        model = CausalLM(network)
        if model.shape.device.type != "cpu":
            model._decoder = None
        return model
    # Here, as the torch mode does without triton.
    from generator_service.graphs import GraphedLM

    recorder = (lambda step: step) if network.device.type == "cpu" else None
    return GraphedLM(network, max_rows if mode == "graphs" else 0, recorder)


# Whether it is right


class _Spied:
    """A model that keeps its last logits."""

    def __init__(self, model: CausalLM) -> None:
        self.shape, self.eos_ids = model.shape, model.eos_ids
        self.logits = torch.empty(0)
        self._model = model

    def forward(
        self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        self.logits = self._model.forward(ids, positions, segments, last)
        return self.logits


def _check(arguments: argparse.Namespace, model: CausalLM, references: list[Any]) -> Result:
    """Our logits after three rounds and two cuts against a full pass of plain transformers."""
    spied = _Spied(model)
    prompt = _prompt(arguments)
    n = arguments.check_n
    with _engine(spied, 24 * n + len(prompt), n) as engine:
        session_id = _open(engine, prompt, n, 24)
        for until, keep in ((8, range(0, n, 2)), (16, range(0, n, 4))):
            engine.extend(session_id, until).result()
            engine.prune(session_id, set(keep)).result()
        batch = engine.extend(session_id, 24).result()
    # The last step read all tokens but the newest.
    sequences = [[*prompt, *prefix.token_ids[:-1]] for prefix in batch.prefixes]
    same, exact = (_plain_logits(reference, sequences) for reference in references)
    ours = spied.logits[: len(sequences)].clone()
    difference = (ours - same).abs().max().item()
    agree = (ours.argmax(-1) == same.argmax(-1)).sum().item()
    errors = _error(ours, exact), _error(same, exact)
    is_exact = model.shape.dtype == torch.float32
    return {
        "rows": len(sequences),
        "max_abs_difference": difference,
        "argmax_agrees": agree,
        "error_against_float32": errors[0],
        "plain_error_against_float32": errors[1],
        "tolerance": f"{_FLOAT32_TOLERANCE} of the largest difference"
        if is_exact
        else f"{_ERROR_RATIO} times the error of plain transformers",
        "is_close": difference <= _FLOAT32_TOLERANCE
        if is_exact
        else errors[0] <= _ERROR_RATIO * errors[1],
    }


@torch.inference_mode()
def _plain_logits(network: Any, sequences: list[list[int]]) -> Tensor:
    """Float32 logits after the last token of each, [sequences, vocabulary]."""
    rows = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=network.device)
        rows.append(network(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1])
    return torch.stack(rows).float()


def _error(found: Tensor, exact: Tensor) -> float:
    error: float = (torch.linalg.norm(found - exact) / torch.linalg.norm(exact)).item()
    return error


# How fast it is


class _Timed:
    """A model that adds up the time of its passes, on the device where there is one."""

    def __init__(self, model: CausalLM) -> None:
        self.shape, self.eos_ids = model.shape, model.eos_ids
        self._model = model
        self._marks: list[tuple[Any, Any]] = []

    def forward(
        self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        begin = self._mark()
        logits = self._model.forward(ids, positions, segments, last)
        self._marks.append((begin, self._mark()))
        return logits

    def take_ms(self) -> float:
        """The median of the passes since it was last asked."""
        _synchronize(self.shape.device)
        marks, self._marks = self._marks, []
        passes: list[float] = [
            begin.elapsed_time(end) if self.shape.device.type == "cuda" else 1000 * (end - begin)
            for begin, end in marks
        ]
        return statistics.median(passes)

    def _mark(self) -> Any:
        if self.shape.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _decode(
    arguments: argparse.Namespace, model: CausalLM, n: int, ceilings: dict[str, float]
) -> Result:
    """Steps of one session of n candidates, then a cut of half of them."""
    device, steps = model.shape.device, arguments.steps
    until = arguments.begin + steps
    prompt = _prompt(arguments)
    timed = _Timed(model)
    with _engine(timed, len(prompt) + n * (until + 1), n) as engine:
        session_id = _open(engine, prompt, n, until + 1)
        engine.extend(session_id, arguments.begin).result()
        timed.take_ms()
        _reset_peak(device)
        seconds = _seconds(device, lambda: engine.extend(session_id, until).result())
        forward_ms = timed.take_ms()
        peak = _peak_bytes(device)
        prune_ms = _prune_ms(device, engine, session_id, range(0, n, 2))
    step_ms = 1000 * seconds / steps
    seen = len(prompt) + n * (arguments.begin + steps // 2)
    moved, flops = _least_work(model, n, seen)
    memory_ms = 1000 * moved / ceilings["bytes_per_s"]
    product_ms = 1000 * flops / ceilings["flops_per_s"]
    return {
        "tokens_per_s": n * steps / seconds,
        "step_ms": step_ms,
        "forward_ms": forward_ms,
        "memory_bound_ms": memory_ms,
        "product_bound_ms": product_ms,
        "share_of_memory_bound": memory_ms / step_ms,
        "share_of_bound": max(memory_ms, product_ms) / step_ms,
        "peak_bytes": peak,
        "prune_ms": prune_ms,
    }


def _least_work(model: CausalLM, rows: int, slots: int) -> tuple[int, int]:
    """Bytes that a step must read, weights and KV, and operations of its products with weights."""
    layers: list[Any] = [*model.products]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    weight_bytes = weights * model.shape.dtype.itemsize
    return weight_bytes + slots * model.shape.slot_bytes, 2 * rows * weights


def _run(arguments: argparse.Namespace, model: CausalLM) -> Result:
    """From the most candidates to the last answer; full memory ends a round, half are kept."""
    device, n = model.shape.device, max(arguments.n)
    slots = arguments.slots or _free_slots(model)
    prompt = _prompt(arguments)
    rounds: list[Result] = []
    num_tokens = 0
    _reset_peak(device)
    began = time.perf_counter()
    with _engine(model, slots, n) as engine:
        session_id = _open(engine, prompt, n, arguments.max_tokens)
        live = list(range(n))
        while live:
            extend_began = time.perf_counter()
            batch = engine.extend(session_id, arguments.max_tokens).result()
            extend_s = time.perf_counter() - extend_began
            num_tokens += sum(prefix.num_new for prefix in batch.prefixes)
            live = [prefix.id for prefix in batch.prefixes if prefix.finish is None][::2]
            prune_ms = _prune_ms(device, engine, session_id, live)
            rounds.append(
                {
                    "decision_token": batch.num_tokens,
                    "ended_by": batch.ended_by.value,
                    "live_after": len(live),
                    "extend_s": _short(extend_s),
                    "prune_ms": _short(prune_ms),
                }
            )
    seconds = time.perf_counter() - began
    return {
        "n": n,
        "slots": slots,
        "seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "peak_bytes": _peak_bytes(device),
        "rounds": rounds,
    }


def _prune_ms(
    device: torch.device, engine: Engine, session_id: int, keep: Collection[int]
) -> float:
    return 1000 * _seconds(device, lambda: engine.prune(session_id, keep).result())


def _free_slots(model: CausalLM) -> int:
    """In 0.8 of what is free: sampling and attention need some."""
    if model.shape.device.type != "cuda":
        return 4096
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.shape.device)
    return int(0.8 * free) // model.shape.slot_bytes


def _prompt(arguments: argparse.Namespace) -> list[int]:
    return [1 + 37 * i % (arguments.vocabulary - 1) for i in range(arguments.prompt)]


@contextmanager
def _engine(model: Any, slots: int, rows: int) -> Iterator[Engine]:
    engine = Engine(model, slots, prefill_chunk=512, max_rows=rows)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _open(engine: Engine, prompt: list[int], n: int, max_tokens: int) -> int:
    sampling = Sampling(max_tokens=max_tokens, seed=1, ignore_eos=True)
    session_id, opened = engine.open(OpenCommand(prompt, n, sampling, 1))
    opened.result()
    return session_id


# The device


def _ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per second, read plus written, of a copy; operations per second of a product."""
    count, side = (1 << 32, 8192) if device.type == "cuda" else (1 << 24, 256)
    source = torch.randint(0, 100, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    factors = torch.randn(2, side, side, dtype=dtype, device=device)
    copying = _median_seconds(device, lambda: target.copy_(source))
    multiplying = _median_seconds(device, lambda: factors[0] @ factors[1])
    return {"bytes_per_s": 2 * count / copying, "flops_per_s": 2 * side**3 / multiplying}


def _median_seconds(device: torch.device, work: Callable[[], object]) -> float:
    return statistics.median([_seconds(device, work) for _ in range(13)][3:])


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Until the device has done it."""
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int | None:
    """Most that tensors took since the reset, the weights among them; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _machine(device: torch.device) -> Result:
    machine: Result = {**describe_machine()}
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    if triton := sys.modules.get("triton"):
        machine["triton"] = triton.__version__
    return machine


if __name__ == "__main__":
    sys.exit(main())
