"""`specrej experiment branching`: branching against Speculative Rejection, on live requests.

Forks draw tokens that no collection has, so nothing is replayed. On every prompt all systems run in
turn, with the same seed. The answer is the candidate with the highest reward, complete or not. Each
run is one line of the file. `judges` are other rewards, which no cut has used; `source` is a digest
of prompt, sampling and models:

    {"prompt_id": "...", "reward": "relevance", "max_tokens": 128, "system": "branching 32/16,4",
      "source": "9f86d081884c7d65", "tokens": 2192, "seconds": 5.4, "score": 0.77,
      "answer_tokens": 81, "mean_logprob": -1.2, "judges": {"harmless": -0.3},
      "machine": {"processor": "...", "cores": 2, ...}}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deploy.local.machine import describe_machine
from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.statistics import bootstrap, matched_cost, mean, resampled, shown
from experiments.studies import Study
from experiments.trajectories import FloatArray, IntArray, prompt_line
from orchestrator.loop.scoring import RequestScorer
from specrej.contracts import Branching, Candidate, Generation, GenerationRequest, Selection

Run = dict[str, Any]

_BRANCHING = "branching"
_KEYS = ("prompt_id", "reward", "max_tokens", "system", "source")  # that identify a run
_FIGURES = {"tokens": "tokens", "reward": "score", "answer tokens": "answer_tokens"}


@dataclass(frozen=True, slots=True)
class System:
    """Speculative Rejection with its defaults, or branching from `n` candidates."""

    n: int
    branching: Branching | None = None

    @property
    def name(self) -> str:
        return f"{_BRANCHING} {self.n}/{self.branching}" if self.branching else f"N = {self.n}"

    @property
    def selection(self) -> Selection:
        return Selection(n=self.n, branching=self.branching)


def read_runs(path: Path) -> list[Run]:
    """The runs of a file; none if it does not exist."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


async def measure(
    out: Path,
    items: Sequence[Item],
    settings: Settings,
    systems: Sequence[System],
    models: Models,
) -> list[Run]:
    """The runs of these systems on these prompts; those in the file are not repeated.

    Runs of another prompt, sampling or model stay in the file and are not returned.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stored = {tuple(run.get(key) for key in _KEYS): run for run in read_runs(out)}
    machine = describe_machine()
    runs = []
    for number, item in enumerate(items, 1):
        source = _source(item, settings, models)
        for reward, system in itertools.product(settings.rewards, systems):
            key = (item.id, reward, settings.max_tokens, system.name, source)
            if key not in stored:
                made = await _timed(item, settings, system, reward, models)
                stored[key] = dict(zip(_KEYS, key, strict=True)) | made | {"machine": machine}
                _write(out, stored.values())
            runs.append(stored[key])
        print(f"[{number}/{len(items)}] {item.id}", file=sys.stderr, flush=True)
    return runs


def _write(path: Path, runs: Iterable[Run]) -> None:
    """Write all runs in one step, so that an interruption leaves a whole file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{json.dumps(run)}\n" for run in runs), "utf-8")
    new.replace(path)


def _source(item: Item, settings: Settings, models: Models) -> str:
    of = (prompt_line(item.prompt), asdict(settings.sampling(item.number)), models.identity())
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


async def _timed(
    item: Item, settings: Settings, system: System, reward: str, models: Models
) -> Run:
    request = GenerationRequest(item.prompt, settings.sampling(item.number), system.selection)
    began = time.perf_counter()
    generation = await models.answer(request, reward)
    best, seconds = generation.best, time.perf_counter() - began
    return {
        "tokens": generation.usage.generated_tokens,
        "seconds": round(seconds, 3),
        "score": best.score,
        "answer_tokens": best.num_tokens,
        "mean_logprob": best.mean_logprob,
        "judges": await _judged(item, generation, reward, models),
    }


async def _judged(
    item: Item, generation: Generation, reward: str, models: Models
) -> dict[str, float]:
    """The scores of the answer by the other rewards."""
    best = generation.best
    answer = Candidate(best.id, best.text, best.num_tokens, 0.0, best.finish)
    judges = {}
    for name, scorer in models.scorers.items():
        if name != reward:
            async with RequestScorer([scorer], item.prompt) as session:
                judges[name] = (await session.score([answer])).values[0][0]
    return judges


def compare(runs: Sequence[Run], reward: str) -> tuple[Study, Study]:
    """How each branching differs from each N on the same prompts; then each system, with the tokens
    that rejection needs for branching's mean reward.

    Judges differ in standard deviations over all answers. The mean log-probability of the answer is
    a judge, too.

    Raises:
        ValueError: no prompt has a run of every system.
    """
    runs = [run for run in runs if run["reward"] == reward]
    frame = _frame(runs)
    judges = [*sorted(set.intersection(*({*run["judges"]} for run in runs))), "logprob"]
    by_system = {
        name: of.set_index("prompt_id") for name, of in frame.groupby("system", sort=False)
    }
    # In the order of N: values of a file that was continued later may come first.
    sizes = sorted((name for name in by_system if not name.startswith(_BRANCHING)), key=_candidates)
    rejection = {name: by_system[name] for name in sizes}
    deviations = frame[judges].std(ddof=0).replace(0, 1.0)
    rows, differences = [], []
    for name, of in by_system.items():
        figures = {heading: mean(of[column]) for heading, column in _FIGURES.items()}
        is_branching = name not in rejection and bool(rejection)
        ratio, beyond = times_fewer(of, [*rejection.values()]) if is_branching else (math.nan,) * 2
        ratios = {"times fewer": ratio, "draws beyond the largest N": beyond}
        judged = "; ".join(f"{judge} {of[judge].mean():.3f}" for judge in judges)
        rows.append({"system": name, **figures, **ratios, "judges": judged})
        for n, against in rejection.items() if is_branching else ():
            moved = (of[judges] - against[judges]) / deviations
            differences.append(
                {
                    "systems": f"{name}, {n}",
                    "reward": mean(of.score - against.score),
                    "answer tokens": mean(of.answer_tokens - against.answer_tokens),
                    **{f"{judge}, sd": mean(moved[judge]) for judge in judges},
                }
            )
    caption = f"{reward}, {frame.prompt_id.nunique()} prompts, by reward alone"
    return (
        Study("differences", caption, pd.DataFrame(differences)),
        Study("branching", caption, pd.DataFrame(rows)),
    )


def _candidates(system: str) -> int:
    """The N of "N = 16"."""
    return int(system.rpartition(" ")[2])


def _frame(runs: Sequence[Run]) -> pd.DataFrame:
    """The runs of the prompts that every system has answered, by prompt."""
    flat = [run | run["judges"] | {"logprob": run["mean_logprob"]} for run in runs]
    frame = pd.DataFrame(flat, columns=None if flat else [*_KEYS])
    frame = frame.drop_duplicates(["prompt_id", "system"], keep="last")
    num_systems = frame.groupby("prompt_id").system.transform("size")
    frame = frame[num_systems == frame.system.nunique()]
    if frame.empty:
        raise ValueError("no prompt has a run of every system")
    return frame.sort_values("prompt_id", kind="stable")


def times_fewer(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tuple[Any, float]:
    """The tokens that the others need for the mean reward of `own`, divided by the tokens of `own`.

    Each has columns "tokens" and "score", by prompt. `others` are in the order of N; their tokens
    are those of `matched_cost`: infinite ("beyond") if none has the reward. If the first one has
    it, the ratio of its tokens is an upper bound: "below" it. Then the share of resampled prompts
    in which none has the reward.
    """
    columns = {key: np.stack([other[key] for other in others]) for key in ("tokens", "score")}
    score, spent = np.asarray(own["score"]), np.asarray(own["tokens"])

    def ratio(prompts: IntArray) -> FloatArray:
        drawn = np.atleast_2d(prompts)
        tokens, rewards = (columns[key][:, drawn].mean(axis=-1).T for key in ("tokens", "score"))
        rising = np.maximum.accumulate(rewards, axis=-1)
        needed = matched_cost(tokens, rising, score[drawn].mean(axis=-1))
        ratios: FloatArray = needed / spent[drawn].mean(axis=-1)
        return ratios.reshape(prompts.shape[:-1])

    estimate = bootstrap(len(score), ratio)
    beyond = float(np.isinf(resampled(len(score), ratio)).mean())
    is_below = score.mean() <= np.mean(others[0]["score"])
    return (f"below {shown(estimate.value)}" if is_below else estimate), beyond
