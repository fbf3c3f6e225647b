"""Cost of the session verbs on vLLM, and the own engine beside it: `make bench-vllm`.

"bare" is one call of vLLM's own `LLM.generate` with n = N and prefix caching; "whole" the same
tokens through the generator's session verbs in one round. "cut" rejects half of the candidates at
16, 32, ... tokens, as the default schedule does; "bare_cut" is the sum of bare calls of the same
rows, tokens and context lengths, without the time to read the prompts of all but the first. The own
engine runs "own" (whole) and "own_cut". Each engine has a process of its own; all take turns with
equal weights, prompt lengths, N and threads. Tokens per second count generated tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from benchmarks.engines import WorkerProcess, generating
from benchmarks.harness import (
    MODEL,
    SETTLE_S,
    interleave,
    medians,
    parse_arguments,
    prompt_ids,
    report,
    rounded,
    run_cases,
)
from experiments.replay import decision_tokens
from specrej.client.options import parse_schedule

# Names of results that differ from the names of their runs.
_NAMES = {"verbs": "whole", "verbs_cut": "cut"}
_PROMPT_WORDS = ("amber", "birch", "cloud", "delta", "ember", "field", "grove", "heath")


@dataclass(frozen=True, slots=True)
class Case:
    """N candidates, and the decision tokens; the last one is the end."""

    n: int
    decision_tokens: tuple[int, ...]

    @property
    def rounds(self) -> Iterator[tuple[int, int, int]]:
        """Live candidates of each round, tokens they have before it, and at its end.

        Half of the candidates are rejected at each decision token.
        """
        live, previous = self.n, 0
        for until in self.decision_tokens:
            yield live, previous, until
            previous, live = until, max(1, live // 2)

    @property
    def num_tokens(self) -> int:
        return sum(live * (until - previous) for live, previous, until in self.rounds)


def main() -> None:
    """Measure and report; an N that fails is reported, and so are those that its end makes fail."""
    arguments = parse_arguments(
        __doc__,
        model=(MODEL, "folder of the weights"),
        n=([16, 64, 128, 256], "candidates"),
        words=(40, "words of the prompt"),
        new=(64, "new tokens of the last candidate"),
        rounds=(3, "measured rounds"),
        threads=(len(os.sched_getaffinity(0)), "threads of each engine"),
        vllm_options=("{}", "more engine arguments of vLLM"),
        without_own=(False, "leave out the own engine, which is a reference on CUDA"),
    )
    with ExitStack() as stack:
        workers = dict(_workers(arguments))
        for worker in workers.values():
            stack.callback(worker.stop)
        versions = {name: worker.ready() for name, worker in workers.items()}
        numbers = itertools.count()
        results, failed = run_cases(
            {f"n={n}": partial(_measure, workers, n, arguments, numbers) for n in arguments.n}
        )
    report(
        f"tokens/s of {arguments.new} tokens (median of the rounds)",
        (
            *("N", "bare", "verbs", "verbs / bare", "bare, cut", "verbs, cut", "verbs / bare"),
            *(() if arguments.without_own else ("own", "own, cut", "own / verbs")),
        ),
        map(_row, results.values()),
        {
            "cases": [*results.values()],
            "failed": failed,
            "model": arguments.model.name,
            "new_tokens": arguments.new,
            "threads": arguments.threads,
            "versions": versions,
        },
        notes=[f"{case} failed: {reason}" for case, reason in failed.items()],
    )
    sys.exit(bool(failed))


def _workers(arguments: argparse.Namespace) -> Iterator[tuple[str, WorkerProcess]]:
    most = max(arguments.n)
    # vLLM rounds a candidate's slots and its part of the prompt up to whole blocks.
    slots = most * (arguments.new + 64) + 4 * arguments.words + 64
    engines = {engine.name: engine for engine in generating(arguments.model, slots, 1024, most)}
    more = json.loads(arguments.vllm_options)
    bare = engines["vllm"]
    verbs = bare.behind_verbs(arguments.model, slots, most)
    for name, spec in (("bare", bare), ("verbs", verbs)):
        options = {**spec.options.get("vllm_options", {}), **more}
        with_more = replace(spec, options={**spec.options, "vllm_options": options})
        yield name, with_more.start(arguments.threads)
    if not arguments.without_own:
        own = engines["specrej"].behind_verbs(arguments.model, slots, most)
        yield "own", own.start(arguments.threads)


def _measure(
    workers: Mapping[str, WorkerProcess],
    n: int,
    arguments: argparse.Namespace,
    numbers: Iterator[int],
) -> dict[str, Any]:
    """The result of one N, as in the JSON line; `numbers` are those of the bare prompts."""
    words = (_PROMPT_WORDS[at * at % len(_PROMPT_WORDS)] for at in range(arguments.words))
    prompt = " ".join(words)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    bare = partial(_bare, workers["bare"], len(tokenizer.encode(prompt).ids), numbers)
    cuts = decision_tokens(parse_schedule("geometric:16,2"), arguments.new)
    cases = {"": Case(n, (arguments.new,)), "_cut": Case(n, (*cuts, arguments.new))}
    runs, tokens = {}, {}
    for suffix, case in cases.items():
        request = {"n": n, "prompt": prompt, "decision_tokens": case.decision_tokens}
        verbs = {
            name: partial(worker.measure, request)
            for name, worker in workers.items()
            if name != "bare"
        }
        for name, run in {"bare": partial(bare, case), **verbs}.items():
            runs[f"{name}{suffix}"], tokens[f"{name}{suffix}"] = run, case.num_tokens
    seconds = interleave(runs, arguments.rounds, SETTLE_S)
    speeds = {name: [tokens[name] / s for s in values] for name, values in seconds.items()}
    middle = {name: round(speed, 1) for name, speed in medians(speeds).items()}
    return {
        "n": n,
        **{_NAMES.get(name, name): speed for name, speed in middle.items()},
        "rounds": {name: rounded(values) for name, values in speeds.items()},
    }


def _bare(worker: WorkerProcess, prompt_tokens: int, numbers: Iterator[int], case: Case) -> float:
    """Seconds of bare calls for the rounds of a case; only the first one counts its prompt."""

    def call(n: int, length: int, new_tokens: int) -> float:
        ids = prompt_ids(length, next(numbers))
        return worker.measure({"n": n, "prompt_ids": ids, "new_tokens": new_tokens})

    seconds = 0.0
    for live, before, until in case.rounds:
        if not before:
            seconds += call(live, prompt_tokens, until)
        else:  # the first token comes with the prompt
            length = prompt_tokens + before - 1
            seconds += call(live, length, until - before + 1) - call(live, length, 1)
    return seconds


def _row(result: Mapping[str, Any]) -> Sequence[object]:
    def ratio(one: str, other: str) -> str:
        return f"{result[one] / result[other]:.2f}"

    speeds = {name: f"{value:.0f}" for name, value in result.items() if name != "rounds"}
    return (
        *(speeds["n"], speeds["bare"], speeds["whole"], ratio("whole", "bare")),
        *(speeds["bare_cut"], speeds["cut"], ratio("cut", "bare_cut")),
        *((speeds["own"], speeds["own_cut"], ratio("own", "whole")) if "own" in speeds else ()),
    )


if __name__ == "__main__":
    main()
