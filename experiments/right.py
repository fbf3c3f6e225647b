"""Right answers for fewer tokens: verifiers, waves and votes on tasks with known answers.

`make right ARGS="checks"`, `"reasoning"`, `"calls"`, and with a larger model `"humaneval"` and
`"thinking"`: collects all candidates of each task at a service that runs on this machine, once;
replays every policy on them by the loop that serves requests (`experiments.recorded`); and writes a
table with 95 % intervals over tasks. With --live, services with the verifier answer the first tasks
as well, by the study's policy for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import provenance, report
from experiments import candidates, right_tasks
from experiments.pictures import draw
from experiments.recorded import Answer, RecordedGenerator
from experiments.right_tasks import IsRight, Task
from experiments.statistics import Estimate, bootstrap, mean
from orchestrator.edge.extractors import extractor
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import run
from orchestrator.loop.scoring import LikelihoodScorer
from reward_service.reward import Reward, score_batch
from specrej import contracts as c

_BEST_OF_N = c.Algorithm.BEST_OF_N
TEMPERATURE = 0.8
_CHECKED = 16  # tokens between the prefixes whose vetoes are verified


@dataclass(frozen=True, slots=True)
class Study:
    """Tasks, how their candidates are drawn, and the policies to compare with the first one.

    A policy is how one request is answered: its selection without n and data.
    """

    tasks: Callable[[int], Sequence[Task]]
    num_tasks: int
    n: int
    max_tokens: int
    policies: Mapping[str, c.Selection]
    verifier: Mapping[str, Any] = field(default_factory=dict)  # spec of the reward `verifier`
    live: str = ""  # the policy of --live
    temperature: float = TEMPERATURE
    form: c.AnswerForm = c.PLAIN  # what marks the reasoning of answers


def _verified(*rewards: c.WeightedReward, waves: int = 0) -> c.Selection:
    """Answers chosen by the verifier at their ends; nothing is rejected for its rank."""
    stop_at = 1.0 if waves else None
    return c.Selection(algorithm=_BEST_OF_N, rewards=rewards, waves=waves, stop_at=stop_at)


_END = c.WeightedReward("verifier", stage="end")
_VETO = c.WeightedReward("verifier", veto_below=1.0)
_COMPILES = c.WeightedReward("verifier", veto_below=1.0, data='{"compiles": true}')
_LIKELY = c.WeightedReward(LIKELIHOOD, stage="cuts")
_LIKELIHOOD = (c.WeightedReward(LIKELIHOOD),)
_LIKELIEST = c.Selection(rewards=_LIKELIHOOD, schedule=c.Schedule(first=16))
_MAJORITY = c.Selection(algorithm=_BEST_OF_N, rewards=_LIKELIHOOD)


def _voting(extractor: Any = "number", stop: float = 1.0, **more: Any) -> c.Selection:
    """Answers chosen by a vote, which ends once the leader is so probable; 1: once it is safe."""
    return replace(_MAJORITY, vote=c.Vote(extractor, stop_probability=stop), **more)


def _rejecting(first: int, extractor: Any = "tool_call", **more: Any) -> c.Selection:
    """A vote of those that rejection by likelihood keeps."""
    schedule, vote = c.Schedule(first=first), c.Vote(extractor)
    return c.Selection(alpha=0.5, schedule=schedule, rewards=_LIKELIHOOD, vote=vote, **more)


def _confident(keep: float) -> c.Selection:
    cut = c.ConfidenceCut(keep, 4)
    return replace(_MAJORITY, vote=c.Vote(weight="confidence"), waves=8, confidence_cut=cut)


STUDIES = {
    "checks": Study(
        right_tasks.checks,
        num_tasks=100,
        n=16,
        max_tokens=160,
        policies={
            "Best-of-N": _verified(_END),
            "vetoes": _verified(_VETO),
            "waves of 4": _verified(_END, waves=4),
            "waves of 4, vetoes": _verified(_VETO, waves=4),
            "waves of 1, vetoes": _verified(_VETO, waves=1),
            "rejection by likelihood": c.Selection(rewards=(_LIKELY, _END)),
        },
        verifier={"kind": "checks"},
    ),
    "reasoning": Study(
        right_tasks.reasoning,
        num_tasks=200,
        n=32,
        max_tokens=32,
        policies={
            "majority": _voting(min_answers=32),  # so it never ends early
            "first to end, likeliest": replace(_MAJORITY, first=1),
            "exact stop": _voting(),
            "stop at 0.95, waves of 1": _voting(stop=0.95, waves=1),
            "exact stop, waves of 4": _voting(waves=4),
            **{f"stop at {p}, waves of 4": _voting(stop=p, waves=4) for p in (0.99, 0.95, 0.9)},
            **{f"confidence {keep}, waves of 8": _confident(keep) for keep in (0.9, 0.5)},
        },
    ),
    "thinking": Study(
        right_tasks.thinking,
        num_tasks=60,
        n=16,
        max_tokens=256,
        policies={
            "vote of all": _voting(min_answers=16),
            "reasoning left alone": _rejecting(16, "number"),
            "reasoning scored": _rejecting(16, "number", score_thinking=True),
            "left alone, likeliest": _LIKELIEST,
            "scored, likeliest": replace(_LIKELIEST, score_thinking=True),
        },
        form=c.AnswerForm(thinking_begin="<think>", thinking_end="</think>"),
    ),
    "calls": Study(
        right_tasks.calls,
        num_tasks=100,
        n=16,
        max_tokens=96,
        policies={
            "vote of all": _voting("tool_call", min_answers=16),
            "first to end, likeliest": replace(_MAJORITY, first=1),
            "likelihood": _MAJORITY,
            "exact stop, waves of 4": _voting("tool_call", waves=4),
            "stop at 0.95, waves of 4": _voting("tool_call", 0.95, waves=4),
            **{f"stop at {p}, waves of 2": _voting("tool_call", p, waves=2) for p in (0.95, 0.9)},
            "stop at 0.8, waves of 1": _voting("tool_call", 0.8, waves=1),
            **{f"rejection from {first}, vote": _rejecting(first) for first in (8, 16)},
        },
        temperature=0.65,
    ),
    "humaneval": Study(
        right_tasks.humaneval,
        num_tasks=60,
        n=16,
        max_tokens=320,
        policies={
            "Best-of-N": _verified(_END),
            **{f"waves of {waves}": _verified(_END, waves=waves) for waves in (1, 2, 4)},
            "waves of 4, vetoes": _verified(_VETO, waves=4),
            "must compile": _verified(_COMPILES, _END),
            "rejection by likelihood": c.Selection(rewards=(_LIKELY, _END)),
            "likelihood, must compile": c.Selection(rewards=(_LIKELY, _COMPILES, _END)),
        },
        verifier={"kind": "tests"},
        live="waves of 4",
    ),
}


def _sampling(study: Study, task: Task) -> c.Sampling:
    return c.Sampling(study.max_tokens, temperature=study.temperature, seed=task.number)


async def collect(study: Study, tasks: Sequence[Task], path: Path, model: str) -> None:
    """Generate the missing tasks' candidates to their ends, and add them to the file."""
    known = {line["task"] for line in candidates.lines(path)}
    missing = [task for task in tasks if task.id not in known]
    if not missing:
        return
    async with candidates.serving(study.n, study.max_tokens, model) as client:
        about = {"tool_format": (await client.describe()).generator.tool_format}
        for number, task in enumerate(missing, 1):
            sampling = _sampling(study, task)
            made = await candidates.record(client, task.prompt, study.n, sampling)
            answers = [one.to_json() for one in made]
            candidates.add(path, {"task": task.id, **about, "answers": answers})
            print(f"[{number}/{len(missing)}] {task.id}", file=sys.stderr, flush=True)


def scorer_of(reward: Any, data: str) -> c.Scorer:
    """A reward of this process, for one request."""

    @asynccontextmanager
    async def scoring(prompt: c.Prompt) -> AsyncIterator[c.ScoringSession]:
        session = reward.open_with(prompt, data) if isinstance(reward, Reward) else prompt

        class Session:
            async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
                if isinstance(reward, Reward):
                    return score_batch(session, reward, candidates)
                scores: c.Scores = await reward.answer(prompt, candidates, data)
                return scores

        yield Session()

    return scoring


async def replay(
    study: Study, policy: c.Selection, task: Task, answers: Sequence[Answer], verifier: Any
) -> c.Generation:
    """The answer of a policy, from recorded candidates."""
    least, n = min(policy.min_answers, len(answers)), len(answers)
    selection = replace(policy, n=n, return_candidates=n, min_answers=least)
    request = c.GenerationRequest(task.prompt, _sampling(study, task), selection)
    scorers = [
        LikelihoodScorer()
        if reward.name == LIKELIHOOD
        else scorer_of(verifier, reward.data or task.data)
        for reward in selection.rewards
    ]
    votes = extractor(task.vote, {}) if selection.vote else (lambda _: None)
    form = replace(study.form, tool_format=task.tool_format)
    generator, cheap = RecordedGenerator(answers, form), frozenset({"verifier"})
    running = run(request, generator, scorers, cheap=cheap, extract=votes)
    async with aclosing(running) as events:
        *_, last = [event async for event in events]
    assert isinstance(last, c.Finished)
    return last.generation


async def live(
    study: Study, tasks: Sequence[Task], path: Path, model: str
) -> dict[str, float | int]:
    """How services that run the verifier answer, beside the replay of the same tasks."""
    policy = study.policies[study.live]
    recorded = {line["task"]: line["answers"] for line in candidates.lines(path)}
    spec = {"name": "verifier", **study.verifier}
    verifier = right_tasks.verifier_of(study.verifier)
    right, equal, tokens, replayed = 0, 0, 0, 0
    async with candidates.serving(study.n, study.max_tokens, model, spec) as client:
        for task in tasks:
            sampling, of = asdict(_sampling(study, task)), asdict(policy)
            generation = await client.generate(
                task.prompt,
                **{name: of[name] for name in ("algorithm", "waves", "stop_at")},
                **{name: sampling[name] for name in ("max_tokens", "temperature", "seed")},
                n=study.n,
                rewards=[replace(one, data=task.data) for one in policy.rewards],
                cache=c.CacheControl.BYPASS,
            )
            answers = [Answer.from_json(line) for line in recorded[task.id]]
            expected = await replay(study, policy, task, answers, verifier)
            right += generation.best.score >= 1
            equal += generation.best.text == expected.best.text
            tokens += generation.usage.generated_tokens
            replayed += expected.usage.generated_tokens
            print(f"{task.id}: {generation.best.score}", file=sys.stderr, flush=True)
    await verifier.aclose()
    return {
        **{"tasks": len(tasks), "right": right, "texts_of_the_replay": equal},
        **{"tokens": tokens, "tokens_of_the_replay": replayed},
    }


async def judged(task: Task, answers: Sequence[Answer], verifier: Any) -> IsRight:
    """Which answers the verifier passes."""
    async with scorer_of(verifier, task.data)(task.prompt) as session:
        whole = [one.at(number, len(one.tokens)) for number, one in enumerate(answers)]
        values = (await session.score(whole)).values
    right = {one.text for one, value in zip(answers, values, strict=True) if value >= 1}
    return lambda text, _: text in right


async def count_wrong_vetoes(task: Task, answers: Sequence[Answer], verifier: Any) -> int:
    """Candidates that would have passed, and that a prefix of theirs vetoes: 0 is right."""
    wrong = 0
    async with scorer_of(verifier, task.data)(task.prompt) as session:
        for number, answer in enumerate(answers):
            ends = range(_CHECKED, len(answer.tokens), _CHECKED)
            prefixes = [answer.at(number, end) for end in ends]
            final = answer.at(number, len(answer.tokens))
            values = (await session.score([*prefixes, final])).values
            wrong += values[-1] >= 1 and min(values) < 1
    return wrong


async def evaluate(study: Study, tasks: Sequence[Task], path: Path) -> dict[str, Any]:
    """Every policy on every task."""
    recorded = {line["task"]: line for line in candidates.lines(path)}
    known = (task for task in tasks if task.id in recorded)
    tasks = [replace(one, tool_format=recorded[one.id].get("tool_format", "")) for one in known]
    verifier = right_tasks.verifier_of(study.verifier)
    right: dict[str, list[float]] = {name: [] for name in study.policies}
    tokens: dict[str, list[float]] = {name: [] for name in study.policies}
    wrong_vetoes, invalid_calls, passing = 0, 0, []
    for task in tasks:
        answers = [Answer.from_json(line) for line in recorded[task.id]["answers"]]
        is_right = task.is_right or await judged(task, answers, verifier)
        passing.append(np.mean([is_right(one.text, None) for one in answers]))
        for name, policy in study.policies.items():
            generation = await replay(study, policy, task, answers, verifier)
            best = generation.best
            right[name].append(float(is_right(best.text, best.vote)))
            tokens[name].append(generation.usage.generated_tokens)
            invalid_calls += not right_tasks.are_valid(task.prompt, best.parts)
        if study.tasks is right_tasks.checks:
            wrong_vetoes += await count_wrong_vetoes(task, answers, verifier)
    rows = table(right, tokens, next(iter(study.policies)))
    for row in rows:
        row["less one sample"] = _cells(mean(np.subtract(right[row["policy"]], passing)))
    about = {"tasks": len(tasks), "n": study.n, "one_sample": float(np.mean(passing))}
    if study.tasks is right_tasks.checks:
        about["passing_candidates_vetoed"] = wrong_vetoes
    if study.tasks is right_tasks.calls:
        about["answers_with_invalid_calls"] = invalid_calls
    return about | {"policies": rows}


def table(
    right: Mapping[str, Sequence[float]], tokens: Mapping[str, Sequence[float]], base: str
) -> list[dict[str, Any]]:
    """A row for each policy: from what is right and the tokens, task by task."""

    def row(name: str) -> dict[str, Any]:
        own, others = np.array(tokens[name]), np.array(tokens[base])

        def ratio(tasks: Any) -> Any:
            return own[tasks].sum(axis=-1) / others[tasks].sum(axis=-1)

        return {
            "policy": name,
            "right": _cells(mean(right[name])),
            "less the base's": _cells(mean(np.subtract(right[name], right[base]))),
            "tokens": round(float(own.mean()), 1),
            "of the base's tokens": _cells(bootstrap(len(own), ratio)),
        }

    return [*map(row, right)]


def _cells(estimate: Estimate) -> list[float]:
    return [round(value, 4) for value in (estimate.value, estimate.low, estimate.high)]


def main() -> None:
    """Collect, replay, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--tasks", type=int, default=0, help="the first so many; 0: all")
    parser.add_argument("--n", type=int, default=0, help="candidates; 0: those of the study")
    parser.add_argument("--model", default="", help="its directory; default: embedded")
    parser.add_argument("--live", type=int, default=0, help="tasks that services answer, too")
    parser.add_argument("--out", type=Path, default=Path("build/right"), help="folder")
    options = parser.parse_args()
    study = STUDIES[options.study]
    study = replace(study, n=options.n or study.n)
    tasks = study.tasks(options.tasks or study.num_tasks)
    name = f"{options.study}-{Path(options.model).name or 'embedded'}-{study.n}"
    path = options.out / f"{name}.jsonl.gz"
    asyncio.run(collect(study, tasks, path, options.model))
    result = asyncio.run(evaluate(study, tasks, path))
    if options.live and study.live:
        result["live"] = asyncio.run(live(study, tasks[: options.live], path, options.model))
    result |= {"study": options.study, "model": options.model or "embedded", **provenance()}
    points = {
        row["policy"]: [(row["policy"], row["tokens"], Estimate(*row["right"]))]
        for row in result["policies"]
    }
    title = f"{options.study}: {result['tasks']} tasks, N = {study.n}"
    draw(options.out / f"{name}.svg", title, "right answers", {"tokens": points})
    notes = [f"one sample is right in {result['one_sample']:.3f}"]
    counted = ("passing_candidates_vetoed", "answers_with_invalid_calls")
    notes += [f"{key.replace('_', ' ')}: {result[key]}" for key in counted if key in result]
    notes += [f"live: {result['live']}"] if "live" in result else []
    store(options.out / f"{name}.json", title, result, notes)


def store(path: Path, title: str, result: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """Write a study's result, and print its policies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    head = [*result["policies"][0]]
    rows = [
        [str(Estimate(*cell)) if isinstance(cell, list) else cell for cell in row.values()]
        for row in result["policies"]
    ]
    report(title, head, rows, result, notes)


if __name__ == "__main__":
    main()
