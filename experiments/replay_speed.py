"""How fast settings are replayed: `python -m experiments.replay_speed`; made-up answers, no model.

500 settings over 20 prompts of 512 answers each is the bar: under 60 seconds on one core. The last
line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np

from experiments.replay import Replayer, Setting
from experiments.settings import default_grid
from experiments.sweep import default_settings, sweep
from experiments.trajectories import PrefixScores, Trajectories
from loadtest.sweep.machine import describe_machine
from specrej.contracts import Prompt

_REWARD = "made-up"
_PROMPT_TOKENS = 40


def main() -> None:
    """Measure, print a line and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--settings", type=int, default=500)
    arguments = parser.parse_args()
    kept = [made_up(arguments.n, arguments.max_tokens, seed) for seed in range(arguments.prompts)]
    settings = chosen(arguments.settings, arguments.n, arguments.max_tokens)
    began, cpu = time.perf_counter(), time.process_time()
    swept = sweep(kept, settings)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    rounds = sum(len(Replayer(kept[0], _REWARD).run(each).rounds) for each in settings)
    print(f"{len(swept)} settings x {len(kept)} prompts: {seconds:.1f} s, {cpu_s:.1f} s of CPU")
    result = {
        "settings": len(swept),
        "prompts": len(kept),
        "n": arguments.n,
        "max_tokens": arguments.max_tokens,
        "rounds_per_request": round(rounds / len(settings), 2),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        **describe_machine(),
    }
    print(json.dumps(result))


def made_up(n: int, max_tokens: int, seed: int) -> Trajectories:
    """Answers whose rewards wander towards their ends; a third are complete."""
    chance = np.random.default_rng(seed)
    positions = np.array(default_grid(max_tokens), dtype=np.int64)
    num_tokens = np.minimum(chance.geometric(1 / (2.5 * max_tokens), n), max_tokens)
    walk = chance.normal(size=(n, max_tokens)).cumsum(axis=1) / np.sqrt(np.arange(max_tokens) + 1)
    is_there = np.arange(max_tokens) < num_tokens[:, None]
    partial = np.where(num_tokens[:, None] >= positions, walk[:, positions - 1], np.nan)
    scores = PrefixScores(partial, walk[np.arange(n), num_tokens - 1])
    return Trajectories(
        prompt_id=str(seed),
        prompt=Prompt.from_user("made up"),
        prompt_tokens=_PROMPT_TOKENS,
        max_tokens=max_tokens,
        seed=seed,
        positions=positions,
        num_tokens=num_tokens.astype(np.int64),
        finished=num_tokens < max_tokens,
        logprobs=np.where(is_there, -chance.exponential(size=(n, max_tokens)), np.nan),
        rewards={_REWARD: scores},
        texts=("",) * n,
    )


def chosen(count: int, n: int, max_tokens: int) -> list[Setting]:
    """So many settings with all candidates: the sweep's own, then finer alphas of the same."""
    own = default_settings(n, max_tokens, _PROMPT_TOKENS, _REWARD)
    largest = [each for each in own if each.n == n]
    finer = [
        replace(each, alpha=round(each.alpha + step / 100, 2))
        for step in range(10)
        for each in largest
    ]
    return finer[:count]


if __name__ == "__main__":
    main()
