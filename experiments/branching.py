"""`specrej experiment branching`: branching against Speculative Rejection, on live requests.

Forks draw tokens that no collection has, so nothing is replayed. On every prompt all systems run in
turn, with the same seed. The answer is the candidate with the highest reward, complete or not. Each
run is one line of the file. `judges` are other rewards, which no cut has used; `run_id` is equal in
all runs of one call of the command:

    {"prompt_id": "...", "reward": "relevance", "max_tokens": 128, "system": "branching 32/16,4",
      "tokens": 2192, "seconds": 5.4, "score": 0.77, "answer_tokens": 81, "mean_logprob": -1.2,
      "judges": {"harmless": -0.3}, "source": "9f86d081884c7d65", "run_id": "6e340b9cffb37a98",
      "machine": {"processor": "...", "cores": 2, ...}}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.local.machine import describe_machine
from experiments.json_lines import Line, add_line, read_lines
from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.studies.matched import matched_cost
from experiments.studies.statistics import Estimate, bootstrap, interval, mean, resamples
from experiments.studies.tables import Cell, Table, shown
from experiments.trajectories import FloatArray, IntArray, prompt_line
from orchestrator.loop.scoring import RequestScorer
from specrej.contracts import (
    Branching,
    Candidate,
    Generation,
    GenerationRequest,
    Selection,
)

_BRANCHING = "branching"
_KEYS = ("prompt_id", "reward", "max_tokens", "system")  # that identify a run
_FIGURES = ("tokens", "score", "answer_tokens")
_UNKNOWN = (Estimate(float("nan")), float("nan"), float("nan"))

Columns = Mapping[str, NDArray[Any]]  # [prompts] figures of a system's runs, by name


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
        return Selection(n=self.n, branching=self.branching, prefer_complete=False)


async def measure(
    out: Path,
    items: Sequence[Item],
    settings: Settings,
    systems: Sequence[System],
    models: Models,
) -> list[Line]:
    """The runs of these systems on these prompts; those in the file are not repeated.

    Raises:
        ValueError: the file has runs of another prompt, sampling or model to compare them with.
    """
    stored = {tuple(run[key] for key in _KEYS): run for run in read_lines(out)}
    for item, reward in itertools.product(items, settings.rewards):
        of = (item.id, reward, settings.max_tokens)
        beside = [run for key, run in stored.items() if key[:-1] == of]
        is_continued = any((*of, system.name) not in stored for system in systems)
        for run in beside:
            own = _source(item, settings, models, run)
            # Runs of earlier versions have no source. They are reported, but not added to.
            if run.get("source", None if is_continued else own) != own:
                why = "has runs of another prompt, sampling or model, or of an unknown one"
                do = "choose another file, or name all rewards of this one"
                raise ValueError(f"{out}: {item.id} {why}: {do}")
    about = {"run_id": secrets.token_hex(8), "machine": describe_machine()}
    runs = []
    for number, item in enumerate(items, 1):
        for reward, system in itertools.product(settings.rewards, systems):
            key = (item.id, reward, settings.max_tokens, system.name)
            if key not in stored:
                made = await _timed(item, settings, system, reward, models)
                made = dict(zip(_KEYS, key, strict=True)) | made
                made["source"] = _source(item, settings, models, made)
                stored[key] = made | about
                add_line(out, stored[key])
            runs.append(stored[key])
        print(f"[{number}/{len(items)}] {item.id}", file=sys.stderr, flush=True)
    return runs


def _source(item: Item, settings: Settings, models: Models, run: Line) -> str:
    """A digest of what determines a run beside its key: its own reward and judges among others."""
    identity = models.identity({run["reward"], *run["judges"]})
    of = (prompt_line(item.prompt), asdict(settings.sampling(item.number)), identity)
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


async def _timed(
    item: Item, settings: Settings, system: System, reward: str, models: Models
) -> Line:
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


def compare(runs: Sequence[Line], reward: str) -> tuple[Table, Table]:
    """How each branching differs from each N on the same prompts; then each system, with the tokens
    that rejection needs for branching's mean reward.

    Judges differ in standard deviations over all answers; seconds are medians of ratios.

    Raises:
        ValueError: no prompt has a run of every system.
    """
    columns, judges = _columns([run for run in runs if run["reward"] == reward])
    # In the order of N: values of a file that was continued later may come first.
    sizes = sorted((n for n in columns if not n.startswith(_BRANCHING)), key=_candidates)
    rejection = {name: columns[name] for name in sizes}
    rows: list[tuple[Cell, ...]] = []
    differences: list[tuple[Cell, ...]] = []
    for name, of in columns.items():
        judged = "; ".join(f"{judge} {of[judge].mean():.3f}" for judge in judges)
        ratio = _UNKNOWN if name in rejection else times_fewer(of, [*rejection.values()])
        rows.append((name, *(mean(of[key]) for key in _FIGURES), *ratio, judged))
        for n, against in rejection.items() if name not in rejection else ():
            changes = [mean(of[key] - against[key]) for key in ("score", "answer_tokens")]
            moves = [mean((of[judge] - against[judge]) / sd) for judge, sd in judges.items()]
            differences.append((f"{name}, {n}", *changes, *_seconds(of, against), *moves))
    num_prompts = len(next(iter(columns.values()))["tokens"])
    caption = f"{reward}, {num_prompts} prompts, by reward alone"
    headings = (
        *("system", "tokens", "reward", "answer tokens", "times fewer"),
        *("draws below the least N", "draws beyond the largest N", "judges"),
    )
    headings_of_differences = (
        *("systems", "reward", "answer tokens", "seconds, median of ratios"),
        *("prompts timed together", *(f"{judge}, sd" for judge in judges)),
    )
    return (
        Table("differences", caption, headings_of_differences, tuple(differences)),
        Table("branching", caption, headings, tuple(rows)),
    )


def _candidates(system: str) -> int:
    """The N of "N = 16"."""
    return int(system.rpartition(" ")[2])


def _columns(runs: Sequence[Line]) -> tuple[dict[str, Columns], dict[str, float]]:
    """Figures by system, one value per prompt that every system has answered, in the order of their
    ids; and the standard deviation over all answers of each judge that all runs have."""
    by_system: dict[str, dict[str, Line]] = {}
    for one in runs:
        flat = {"run_id": ""} | one | one["judges"] | {"logprob": one["mean_logprob"]}
        by_system.setdefault(one["system"], {})[one["prompt_id"]] = flat
    prompt_ids = sorted({one["prompt_id"] for one in runs})
    complete = [p for p in prompt_ids if all(p in of for of in by_system.values())]
    if not complete:
        raise ValueError("no prompt has a run of every system")
    judges = sorted({*set.intersection(*(set(one["judges"]) for one in runs)), "logprob"})
    names = ("run_id", "seconds", *_FIGURES, *judges)
    columns: dict[str, Columns] = {
        system: {name: np.array([of[p][name] for p in complete]) for name in names}
        for system, of in by_system.items()
    }
    deviations = {
        judge: float(np.std([column[judge] for column in columns.values()])) or 1.0
        for judge in judges
    }
    return columns, deviations


def _seconds(own: Columns, other: Columns) -> tuple[Cell, int]:
    """The median of ratios over the prompts that both answered in one run, and their number."""
    together = (own["run_id"] == other["run_id"]) & (own["run_id"] != "")
    ratios = own["seconds"][together] / other["seconds"][together]
    if not len(ratios):
        return "not measured together", 0
    median = bootstrap(len(ratios), lambda prompts: np.median(ratios[prompts], axis=-1))
    return median, len(ratios)


def times_fewer(own: Columns, others: Sequence[Columns]) -> tuple[Cell, float, float]:
    """The tokens that the others need for the mean reward of `own`, divided by the tokens of `own`.

    `others` are in the order of N; their tokens are those of `matched_cost`: infinite ("beyond") if
    none has the reward. If the first one has it, the ratio of its tokens is an upper bound: "below"
    it. Then the shares of resampled prompts in which the first one has it, and in which none has.
    NaN without others.
    """
    if not others:
        return _UNKNOWN
    num_prompts = len(own["score"])

    def figures(prompts: IntArray) -> FloatArray:
        """[3, draws] the ratio, whether it is below, and whether it is beyond."""
        tokens, rewards = (
            np.stack([other[name][prompts].mean(axis=-1) for other in others], axis=-1)
            for name in ("tokens", "score")
        )
        rising = np.maximum.accumulate(rewards, axis=-1)
        cost = matched_cost(tokens, rising, own["score"][prompts].mean(axis=-1))
        ratio = cost / own["tokens"][prompts].mean(axis=-1)
        return np.stack([ratio, cost <= tokens[:, 0], np.isinf(cost)])

    value, is_below, _ = figures(np.arange(num_prompts)[None])[:, 0]
    ratios, below, beyond = figures(resamples(num_prompts))
    ratio = interval(float(value), ratios, num_prompts)
    shares = float(below.mean()), float(beyond.mean())
    return (f"below {shown(float(value))}" if is_below else ratio), *shares
