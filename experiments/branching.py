"""`specrej experiment branching`: branching against Speculative Rejection, on live requests.

Forks draw tokens that no collection has, so nothing is replayed. On every prompt all systems run in
turn, with the same seed. The answer is the candidate with the highest reward, complete or not. Each
run is one line of the file; `judges` are other rewards, which no cut has used:

    {"prompt_id": "...", "reward": "relevance", "max_tokens": 128, "system": "branching 32/16,4",
      "tokens": 2192, "seconds": 5.4, "score": 0.77, "answer_tokens": 81, "mean_logprob": -1.2,
      "judges": {"harmless": -0.3}, "source": "9f86d081884c7d65"}
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.studies.statistics import Estimate, bootstrap, mean
from experiments.studies.tables import Cell, Table
from experiments.trajectories import FloatArray, IntArray, Line, prompt_line
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
_FIGURES = ("tokens", "score", "seconds", "answer_tokens")
_NONE = Estimate(float("nan"))


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
    """All runs, those of an earlier call of the same file first.

    Raises:
        ValueError: the file has a run of another prompt, sampling or model under the same key.
    """
    stored = _stored(out)
    done = {tuple(run[key] for key in _KEYS): run.get("source") for run in stored}
    for number, item in enumerate(items, 1):
        source = _source(item, settings, models)
        for reward in settings.rewards:
            for system in systems:
                key = (item.id, reward, settings.max_tokens, system.name)
                if key in done:
                    if done[key] not in (None, source):  # none: of earlier versions
                        why = "was answered with another prompt, sampling or model"
                        raise ValueError(f"{out}: {item.id} {why}: choose another file")
                    continue
                made = await _timed(item, settings, system, reward, models)
                stored.append(dict(zip(_KEYS, key, strict=True)) | made | {"source": source})
                with out.open("a") as file:
                    file.write(json.dumps(stored[-1]) + "\n")
        print(f"[{number}/{len(items)}] {item.id}", file=sys.stderr, flush=True)
    return stored


def _source(item: Item, settings: Settings, models: Models) -> str:
    """A digest of what determines a run beside its key."""
    of = (prompt_line(item.prompt), asdict(settings.sampling(item.number)), models.identity())
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def _stored(out: Path) -> list[Line]:
    """The runs of an earlier call. A last line that it did not finish is cut off."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a+") as file:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]
        if len(whole) < len(text):
            file.truncate(len(whole.encode()))
    return [json.loads(line) for line in whole.splitlines()]


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
    """
    columns, judges = _columns([run for run in runs if run["reward"] == reward])
    # In the order of N: values of a file that was continued later may come first.
    sizes = sorted((n for n in columns if not n.startswith(_BRANCHING)), key=_candidates)
    rejection = {name: columns[name] for name in sizes}
    rows: list[tuple[Cell, ...]] = []
    differences: list[tuple[Cell, ...]] = []
    for name, of in columns.items():
        judged = "; ".join(f"{judge} {of[judge].mean():.3f}" for judge in judges)
        ratio = _NONE if name in rejection else times_fewer(of, [*rejection.values()])
        rows.append((name, *(mean(of[key]) for key in _FIGURES), ratio, judged))
        for n, against in rejection.items() if name not in rejection else ():
            changes = [mean(of[key] - against[key]) for key in ("score", "answer_tokens")]
            moves = [mean((of[judge] - against[judge]) / sd) for judge, sd in judges.items()]
            differences.append((f"{name}, {n}", *changes, _median(of, against), *moves))
    num_prompts = len(next(iter(columns.values()))["tokens"])
    caption = f"{reward}, {num_prompts} prompts, by reward alone"
    headings = ("system", "tokens", "reward", "seconds", "answer tokens", "times fewer", "judges")
    headings_of_differences = (
        *("systems", "reward", "answer tokens", "seconds, median of ratios"),
        *(f"{judge}, sd" for judge in judges),
    )
    return (
        Table("differences", caption, headings_of_differences, tuple(differences)),
        Table("branching", caption, headings, tuple(rows)),
    )


def _candidates(system: str) -> int:
    """The N of "N = 16"."""
    return int(system.rpartition(" ")[2])


def _columns(
    runs: Sequence[Line],
) -> tuple[dict[str, dict[str, FloatArray]], dict[str, float]]:
    """Figures by system, one value per prompt that every system has answered, in the order of their
    ids; and each judge's standard deviation over all answers."""
    by_system: dict[str, dict[str, Line]] = {}
    for one in runs:
        flat = one | one["judges"] | {"logprob": one["mean_logprob"]}
        by_system.setdefault(one["system"], {})[one["prompt_id"]] = flat
    complete = sorted(set.intersection(*(set(of) for of in by_system.values())))
    judges = sorted({*runs[0]["judges"], "logprob"})
    columns = {
        name: {key: np.array([of[p][key] for p in complete], float) for key in (*_FIGURES, *judges)}
        for name, of in by_system.items()
    }
    deviations = {
        judge: float(np.std([column[judge] for column in columns.values()])) or 1.0
        for judge in judges
    }
    return columns, deviations


def _median(own: Mapping[str, FloatArray], other: Mapping[str, FloatArray]) -> Estimate:
    ratios = own["seconds"] / other["seconds"]
    return bootstrap(len(ratios), lambda prompts: np.median(ratios[prompts], axis=-1))


def times_fewer(
    own: Mapping[str, FloatArray], others: Sequence[Mapping[str, FloatArray]]
) -> Estimate:
    """The tokens that the others need for the mean reward of `own`, divided by the tokens of `own`.

    `others` are in the order of N; between two of them, rewards are interpolated linearly in the
    logarithm of tokens. If none reaches the reward, the tokens of the last are a lower bound. NaN
    without others.
    """

    def ratio(prompts: IntArray) -> FloatArray:
        tokens = np.log([other["tokens"][prompts].mean(axis=-1) for other in others])
        rewards = np.maximum.accumulate([other["score"][prompts].mean(axis=-1) for other in others])
        target = own["score"][prompts].mean(axis=-1)
        flat = zip(
            target.reshape(-1),
            rewards.reshape(len(others), -1).T,
            tokens.reshape(len(others), -1).T,
            strict=True,
        )
        reached = np.array([np.interp(*one) for one in flat]).reshape(target.shape)
        return np.asarray(np.exp(reached) / own["tokens"][prompts].mean(axis=-1))

    return bootstrap(len(own["score"]), ratio) if others else _NONE
