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
import math
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deploy.local.machine import describe_machine
from experiments.json_lines import Line, add_line, read_lines
from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.statistics import bootstrap, matched_cost, mean, resampled, shown
from experiments.studies import Study
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
_FIGURES = {"tokens": "tokens", "reward": "score", "answer tokens": "answer_tokens"}
_RATIO = ("times fewer", "draws below the least N", "draws beyond the largest N")


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


def compare(runs: Sequence[Line], reward: str) -> tuple[Study, Study]:
    """How each branching differs from each N on the same prompts; then each system, with the tokens
    that rejection needs for branching's mean reward.

    Judges differ in standard deviations over all answers; seconds are medians of ratios.

    Raises:
        ValueError: no prompt has a run of every system.
    """
    frame, judges = _frame([run for run in runs if run["reward"] == reward])
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
        ratio = dict.fromkeys(_RATIO, math.nan)
        if name not in rejection:
            ratio = dict(zip(_RATIO, times_fewer(of, [*rejection.values()]), strict=True))
        judged = "; ".join(f"{judge} {of[judge].mean():.3f}" for judge in judges)
        rows.append({"system": name, **figures, **ratio, "judges": judged})
        for n, against in rejection.items() if name not in rejection else ():
            change = of[["score", "answer_tokens"]] - against[["score", "answer_tokens"]]
            moved = (of[judges] - against[judges]) / deviations
            differences.append(
                {
                    "systems": f"{name}, {n}",
                    "reward": mean(change.score),
                    "answer tokens": mean(change.answer_tokens),
                    **_seconds(of, against),
                    **{f"{judge}, sd": mean(moved[judge]) for judge in judges},
                }
            )
    num_prompts = frame.prompt_id.nunique()
    caption = f"{reward}, {num_prompts} prompts, by reward alone"
    return (
        Study("differences", caption, pd.DataFrame(differences)),
        Study("branching", caption, pd.DataFrame(rows)),
    )


def _candidates(system: str) -> int:
    """The N of "N = 16"."""
    return int(system.rpartition(" ")[2])


def _frame(runs: Sequence[Line]) -> tuple[pd.DataFrame, list[str]]:
    """The runs of the prompts that every system has answered, and the judges that all runs have.

    The mean log-probability of the answer is a judge, too.
    """
    judges = sorted(set.intersection(*({*run["judges"]} for run in runs))) if runs else []
    flat = [{"run_id": ""} | run | run["judges"] | {"logprob": run["mean_logprob"]} for run in runs]
    if not flat:
        raise ValueError("no prompt has a run of every system")
    frame = pd.DataFrame(flat).drop_duplicates(["prompt_id", "system"], keep="last")
    num_systems = frame.groupby("prompt_id").system.transform("size")
    frame = frame[num_systems == frame.system.nunique()]
    if frame.empty:
        raise ValueError("no prompt has a run of every system")
    # A system's place is that of its first run in the file.
    first = {system: at for at, system in enumerate(dict.fromkeys(run["system"] for run in runs))}
    order = frame.assign(place=frame.system.map(first)).sort_values(["place", "prompt_id"])
    return order, [*judges, "logprob"]


def _seconds(own: pd.DataFrame, other: pd.DataFrame) -> dict[str, Any]:
    """The median of ratios over the prompts that both answered in one run, and their number."""
    together = (own.run_id == other.run_id) & (own.run_id != "")
    ratios = (own.seconds / other.seconds)[together].to_numpy()
    median: Any = "not measured together"
    if len(ratios):
        median = bootstrap(len(ratios), lambda prompts: np.median(ratios[prompts], axis=-1))
    return {"seconds, median of ratios": median, "prompts timed together": len(ratios)}


def times_fewer(own: Any, others: Sequence[Any]) -> tuple[Any, float, float]:
    """The tokens that the others need for the mean reward of `own`, divided by the tokens of `own`.

    Each has columns "tokens" and "score", by prompt. `others` are in the order of N; their tokens
    are those of `matched_cost`: infinite ("beyond") if none has the reward. If the first one has
    it, the ratio of its tokens is an upper bound: "below" it. Then the shares of resampled prompts
    in which the first one has it, and in which none has. NaN without others.
    """
    if not others:
        return math.nan, math.nan, math.nan
    columns = {key: np.stack([other[key] for other in others]) for key in ("tokens", "score")}
    score, spent = np.asarray(own["score"]), np.asarray(own["tokens"])

    def cost(prompts: IntArray) -> tuple[FloatArray, FloatArray]:
        """[draws] the tokens needed, and those of the least N."""
        drawn = np.atleast_2d(prompts)
        tokens, rewards = (columns[key][:, drawn].mean(axis=-1).T for key in ("tokens", "score"))
        rising = np.maximum.accumulate(rewards, axis=-1)
        return matched_cost(tokens, rising, score[drawn].mean(axis=-1)), tokens[:, 0]

    def ratio(prompts: IntArray) -> Any:
        needed = cost(prompts)[0] / spent[np.atleast_2d(prompts)].mean(axis=-1)
        return needed if prompts.ndim > 1 else needed[0]

    estimate = bootstrap(len(score), ratio)
    is_below = bool(np.less_equal(*cost(np.arange(len(score))))[0])
    below, beyond = (
        float(np.mean(resampled(len(score), outside))) if len(score) > 1 else float(is_below)
        for outside in (
            lambda prompts: np.less_equal(*cost(prompts)).reshape(prompts.shape[:-1]),
            lambda prompts: np.isinf(cost(prompts)[0]).reshape(prompts.shape[:-1]),
        )
    )
    return (f"below {shown(estimate.value)}" if is_below else estimate), below, beyond
