"""Which N, alpha and first decision token suit your models?

`specrej experiment --prompts FILE`: generates all candidates of each prompt to their ends and
scores their beginnings at 8, 16, 32, ... tokens, once; then replays settings on them by the loop
that serves requests. Stop it at any time: the same command continues with what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import provenance, report
from experiments import candidates
from experiments.pictures import draw
from experiments.prompts import DEFAULT_PROMPTS, Item, read_prompts
from experiments.recorded import Answer, RecordedGenerator
from experiments.statistics import Estimate, bootstrap, kendall, mean
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import run
from orchestrator.loop.scoring import LikelihoodScorer
from specrej import Client
from specrej.contracts import (
    Algorithm,
    Candidate,
    Finished,
    FinishReason,
    GenerationRequest,
    Prompt,
    Sampling,
    Schedule,
    Scorer,
    Scores,
    ScoringSession,
    Selection,
    WeightedReward,
)
from specrej.contracts.errors import SpecrejError

_FIRSTS, _ALPHAS = (8, 16, 32, 64), (0.3, 0.5, 0.7)
_MOST_SUBSETS = 8  # of a prompt's candidates, over which settings with a smaller N are averaged
_MOST_SCORED = 512  # texts of one request
DEFAULT = "N = 16, alpha 0.5, first 16"


@dataclass(frozen=True, slots=True)
class Setting:
    """alpha 0 is Best-of-N."""

    n: int
    alpha: float = 0.0
    first: int = 16

    def __str__(self) -> str:
        if not self.alpha:
            return f"Best-of-{self.n}"
        return f"N = {self.n}, alpha {self.alpha:g}, first {self.first}"

    def selection(self, reward: str) -> Selection:
        algorithm = Algorithm.SPECULATIVE_REJECTION if self.alpha else Algorithm.BEST_OF_N
        schedule = Schedule("geometric", first=self.first)
        weighted = (WeightedReward(reward),)
        return Selection(self.n, self.alpha or 0.5, schedule, algorithm, weighted)


def settings_of(n: int, max_tokens: int) -> list[Setting]:
    """Best-of-N of every power of two, and rejection from N = 4 on."""
    sizes = [2**k for k in range(n.bit_length()) if 2**k <= n]
    firsts = [first for first in _FIRSTS if first < max_tokens]
    products = itertools.product([size for size in sizes if size >= 4], _ALPHAS, firsts)
    return [*map(Setting, sizes), *itertools.starmap(Setting, products)]


def positions_of(max_tokens: int) -> list[int]:
    """Where beginnings are scored: 8, 16, 32, ..."""
    return [8 * 2**k for k in range(max_tokens.bit_length()) if 8 * 2**k < max_tokens]


async def collect(
    items: Sequence[Item], n: int, sampling: Sampling, reward: str, path: Path, model: str
) -> None:
    """Add the missing prompts to the file."""
    known = {line["prompt"] for line in candidates.lines(path)}
    missing = [item for item in items if item.id not in known]
    if not missing:
        return
    async with candidates.serving(n, sampling.max_tokens, model) as client:
        for number, item in enumerate(missing, 1):
            seeded = replace(sampling, seed=sampling.seed + item.number)
            answers = await candidates.record(client, item.prompt, n, seeded)
            line = {"prompt": item.id, "answers": [answer.to_json() for answer in answers]}
            if reward != LIKELIHOOD:
                line |= await _scored(client, item.prompt, answers, reward, sampling.max_tokens)
            candidates.add(path, line)
            print(f"[{number}/{len(missing)}] {item.id}", file=sys.stderr, flush=True)


async def _scored(
    client: Client, prompt: Prompt, answers: Sequence[Answer], reward: str, max_tokens: int
) -> dict[str, Any]:
    """Scores of whole answers, and by position of beginnings; null where an answer is shorter."""

    async def scores(texts: Sequence[str], *, unfinished: bool) -> list[float]:
        parts = [texts[i : i + _MOST_SCORED] for i in range(0, len(texts), _MOST_SCORED)]
        made = [
            await client.score(prompt, part, reward=reward, unfinished=unfinished) for part in parts
        ]
        return [value for one in made for value in one.values]

    beginnings = {}
    for position in positions_of(max_tokens):
        long = [i for i, answer in enumerate(answers) if len(answer.tokens) > position]
        texts = [answers[i].at(i, position, 0, with_top=False).text for i in long]
        values = dict(zip(long, await scores(texts, unfinished=True), strict=True))
        beginnings[position] = [values.get(i) for i in range(len(answers))]
    is_whole = [answer.finish is FinishReason.STOP for answer in answers]
    finals: dict[int, float] = {}
    for whole in (True, False):
        chosen = [i for i, one in enumerate(is_whole) if one == whole]
        texts = [answers[i].text for i in chosen]
        finals |= dict(zip(chosen, await scores(texts, unfinished=not whole), strict=True))
    return {"beginnings": beginnings, "finals": [finals[i] for i in range(len(answers))]}


def recorded_scorer(
    beginnings: Mapping[int, Sequence[float | None]], finals: Sequence[float]
) -> Scorer:
    """The recorded scores as a reward; beginnings have the lengths of `positions_of`."""

    class Session:
        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            values: list[Any] = [
                finals[c.id] if c.finish else beginnings[c.num_tokens][c.id] for c in candidates
            ]
            return Scores(tuple(values))

    @asynccontextmanager
    async def scoring(prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield Session()

    return scoring


class Recorded:
    """The candidates of one prompt with their scores."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.answers = [Answer.from_json(answer) for answer in line["answers"]]
        self.beginnings = {
            int(position): values for position, values in line.get("beginnings", {}).items()
        }
        self.finals = line.get("finals") or [
            sum(answer.logprobs) / len(answer.logprobs) for answer in self.answers
        ]

    async def replayed(
        self, setting: Setting, sampling: Sampling, reward: str
    ) -> tuple[float, float]:
        """Mean reward of the answer and mean tokens, over distinct subsets of the candidates."""
        starts = range(0, len(self.answers) - setting.n + 1, setting.n)[:_MOST_SUBSETS]
        outcomes = []
        for start in starts:
            part = slice(start, start + setting.n)
            scorer = (
                recorded_scorer(
                    {at: values[part] for at, values in self.beginnings.items()}, self.finals[part]
                )
                if self.beginnings
                else LikelihoodScorer()
            )
            request = GenerationRequest(Prompt.from_user("?"), sampling, setting.selection(reward))
            generator = RecordedGenerator(self.answers[part])
            async with aclosing(run(request, generator, [scorer])) as events:
                *_, last = [event async for event in events]
            assert isinstance(last, Finished)
            tokens = last.generation.usage.generated_tokens
            outcomes.append((last.generation.best.score, float(tokens)))
        values, costs = np.mean(outcomes, axis=0)
        return float(values), float(costs)

    def tau(self, position: int) -> float:
        """Kendall's tau of beginnings and whole answers."""
        pairs = [
            (beginning, final)
            for beginning, final in zip(self.beginnings[position], self.finals, strict=True)
            if beginning is not None
        ]
        return kendall(*zip(*pairs, strict=True)) if len(pairs) > 1 else math.nan


async def evaluate(
    prompts: Sequence[Recorded], n: int, sampling: Sampling, reward: str
) -> dict[str, Any]:
    """Every setting on every prompt, with 95 % intervals over prompts."""
    settings = settings_of(n, sampling.max_tokens)
    outcomes = np.array(
        [[await one.replayed(s, sampling, reward) for s in settings] for one in prompts]
    )  # [prompts, settings, reward and tokens]
    bests = [index for index, setting in enumerate(settings) if not setting.alpha]

    def curve(chosen: Any) -> tuple[Any, Any]:
        """Logarithms of the tokens of Best-of-N, and its rewards, both rising."""
        means = outcomes[chosen][..., bests, :].mean(axis=-3)
        return np.log(means[..., 1]), np.maximum.accumulate(means[..., 0], axis=-1)

    def compared(index: int, kind: str, chosen: Any) -> Any:
        own = outcomes[chosen][..., index, :].mean(axis=-2)
        costs, rewards = curve(chosen)
        rows = zip(*(np.atleast_2d(costs), np.atleast_2d(rewards), np.atleast_2d(own)), strict=True)
        made = [_against(kind, *row) for row in rows]
        return np.reshape(made, np.shape(own)[:-1])

    rows = []
    for index, setting in enumerate(settings):
        row: dict[str, Any] = {
            "setting": str(setting),
            "reward": mean(outcomes[:, index, 0]),
            "tokens": round(float(outcomes[:, index, 1].mean())),
        }
        for name, kind in (("Best-of-N's tokens at equal reward", "tokens"), ("lead", "lead")):
            row[name] = bootstrap(len(prompts), partial(compared, index, kind))
        rows.append(row)
    taus = {at: mean([one.tau(at) for one in prompts]) for at in prompts[0].beginnings}
    return {"settings": rows, "tau": taus, "recommended": recommended(rows)}


def _against(kind: str, costs: Any, rewards: Any, own: Any) -> float:
    """How many times as many tokens Best-of-N needs for the reward; or the reward's lead over
    Best-of-N at equal tokens."""
    value, tokens = own
    if kind == "lead":
        return float(value - np.interp(np.log(tokens), costs, rewards))
    if value > rewards[-1] + 1e-12:
        return math.inf
    return float(np.exp(np.interp(value, rewards, costs)) / tokens)


def recommended(rows: Sequence[Mapping[str, Any]]) -> str:
    """The setting with the largest lead that is surely above 0, for at most the default's tokens;
    else Best-of-N."""
    most = next((row["tokens"] for row in rows if row["setting"] == DEFAULT), math.inf)
    sure = [row for row in rows if row["tokens"] <= most and row["lead"].low > 0]
    best = max(sure, key=lambda row: row["lead"].value, default=None)
    return str(best["setting"]) if best else "Best-of-N: no setting is surely ahead of it"


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, replay, and write the results."""
    parser = argparse.ArgumentParser(prog="specrej experiment", description=__doc__)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS])
    parser.add_argument("--limit", type=int, default=0, help="number of prompts; 0: all")
    parser.add_argument("--n", type=int, default=64, help="candidates of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of prompt 0; prompt i adds i")
    parser.add_argument("--reward", default="relevance", help="one of the reward service")
    parser.add_argument("--model", default="", help="of the generator; default: embedded")
    parser.add_argument("--out", type=Path, default=Path("build/experiments"))
    given = parser.parse_args(arguments)
    if not 1 <= given.n <= 64:
        parser.error("--n must be 1 .. 64: all candidates of a prompt are returned at once")
    sampling = Sampling(given.max_tokens, temperature=given.temperature, seed=given.seed)
    try:
        items = read_prompts(given.prompts, given.limit)
        about = [given.reward, Path(given.model).stem or "embedded", given.n, given.max_tokens]
        name = "-".join(map(str, [*about, f"{given.temperature:g}", given.seed]))
        path = given.out / f"{name}.jsonl.gz"
        asyncio.run(collect(items, given.n, sampling, given.reward, path, given.model))
        ids = {item.id for item in items}
        prompts = [Recorded(line) for line in candidates.lines(path) if line["prompt"] in ids]
        result = asyncio.run(evaluate(prompts, given.n, sampling, given.reward))
    except (SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"specrej experiment: {error}\n")
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        parser.exit(130)
    rows = result["settings"]
    points = [(row["setting"], row["tokens"], row["reward"]) for row in rows]
    groups = {
        "Best-of-N": [point for point in points if point[0].startswith("Best")],
        "Speculative Rejection": [point for point in points if not point[0].startswith("Best")],
    }
    title = f"{len(prompts)} prompts, at most {given.max_tokens} tokens"
    draw(
        path.with_suffix("").with_suffix(".svg"),
        title,
        f"reward ({given.reward})",
        {"tokens": groups},
    )
    plain = json.loads(json.dumps(result | provenance(), default=_plain))
    path.with_suffix("").with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n")
    notes = [
        f"Kendall's tau of beginnings at {at} tokens: {tau}" for at, tau in result["tau"].items()
    ]
    notes.append(f"recommended: {result['recommended']}")
    report(title, [*rows[0]], [[*map(str, row.values())] for row in rows], plain, notes)


def _plain(estimate: Estimate) -> list[float | str | None]:
    """As JSON, which has neither NaN nor infinity."""
    values = (estimate.value, estimate.low, estimate.high)
    return [round(v, 4) if math.isfinite(v) else "beyond" if v > 0 else None for v in values]
