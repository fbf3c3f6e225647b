"""What every kind of reward must do; what each kind's scores mean is tested by kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reward_service.reward import Reward, score, score_batch, take_fairly
from reward_service.specs import ClassifierSpec, Resources
from specrej.contracts import FinishReason, Prompt
from specrej.contracts.errors import InvalidRequest
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from tests.reward_service import tiny
from tests.reward_service.endpoint import served
from tests.reward_service.tiny import PROMPT, TEXTS, batch, load, save, working


def brevity(prompt: Prompt, responses: list[str]) -> list[float]:
    return [-len(response) for response in responses]


# How a tiny model of the kind is saved, and options beside it. Not here: a classifier on
# vLLM, which needs another environment, and those of REMOTE; judge has tests of its own.
KINDS: dict[str, tuple[Callable[[Path], Path] | None, dict[str, Any]]] = {
    "classifier": (save, {}),
    "relevance": (None, {"directory": True}),
    "toy": (None, {}),
    "function": (None, {"function": f"{__name__}:brevity"}),
    "answer": (None, {}),
    "checks": (None, {}),
    "schema": (None, {}),
    "call": (None, {}),
}
# Relevance has a size that takes seconds, and tests of its own.
TINY = [name for name in KINDS if name != "relevance"]
# A text that every kind scores otherwise than an empty one.
TEXT = "one.\n\nTw{}<tool_call>"
# The data of requests, for the kinds that take any.
DATA = {
    "answer": '{"answer": "Tw", "kind": "regex"}',
    "checks": '{"checks": [{"id": "count:unique_word_count", "kwargs": {"N": 2}}]}',
    "schema": '{"schema": {"type": "object"}, "extract": "first_object"}',
    "call": '{"tools": {"a": {}}, "required": false}',
}
Make = Callable[[str], Any]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The reward of that kind."""

    @cache
    def make(name: str) -> Any:
        save_model, options = KINDS[name]
        spec: dict[str, Any] = {"kind": name, **options}
        if save_model:
            spec["directory"] = save_model(tmp_path_factory.mktemp(name))
        elif "directory" in spec:
            spec["directory"] = tiny.MINILM
        return load(**spec)

    return make


def opened(reward: Reward, prompt: Prompt, name: str) -> Any:
    return reward.open_with(prompt, DATA[name]) if name in DATA else reward.open(prompt)


def alone(reward: Reward, prompt: Prompt, texts: dict[int, str], name: str) -> list[float]:
    """The scores of a batch in a session of its own."""
    session = opened(reward, prompt, name)
    values = score_batch(session, reward, batch(texts)).values
    reward.free(session)
    return list(values)


@pytest.mark.parametrize("name", TINY)
def test_growing_texts_in_shared_passes_score_as_from_scratch(make: Make, name: str) -> None:
    """Guards what is kept between rounds, forks, and passes with nothing to compute."""
    reward = make(name)
    prompts = (PROMPT, Prompt.from_user("Count."))
    sessions = [opened(reward, prompt, name) for prompt in prompts]
    texts = {0: "", 1: "a", 2: "On"}
    for number, part in enumerate(("e.\n\nMix", " flour é.\n\n", "", "\n")):
        texts = {key: text + part for key, text in texts.items() if key < 2 or part}
        texts[3 + number] = texts[1] + "!"  # a fork
        tasks = [reward.begin(session, batch(texts)) for session in sessions]
        while pieces := take_fairly(tasks, 60):
            reward.compute(pieces)
        for task, prompt in zip(tasks, prompts, strict=True):
            assert task.scores().values == pytest.approx(
                alone(reward, prompt, texts, name), abs=1e-4
            )
    again = score_batch(sessions[0], reward, batch(texts)).values
    assert again == pytest.approx(alone(reward, PROMPT, texts, name), abs=1e-4)
    for session in sessions:
        reward.free(session)
        assert score_batch(session, reward, batch(texts)).values  # it can be used again
        reward.free(session)
    if hasattr(reward, "check_integrity"):
        reward.check_integrity()
        assert reward.kept_tokens == 0


@pytest.mark.parametrize("name", TINY)
def test_scores_do_not_depend_on_the_batch(make: Make, name: str) -> None:
    """Guards against padding that is read, and scores in another order than the candidates."""
    reward = make(name)
    texts, data = [*TEXTS, TEXTS[0], "x" * 90, TEXT], DATA.get(name, "")
    expected = [value for text in texts for value in score(reward, PROMPT, [text], data).values]
    assert max(expected) - min(expected) > 1e-3
    assert score(reward, PROMPT, texts, data).values == pytest.approx(expected, abs=1e-4)
    backwards = score(reward, PROMPT, texts[::-1], data).values
    assert backwards == pytest.approx(expected[::-1], abs=1e-4)


def test_of_a_response_that_is_too_long_the_end_counts(make: Make) -> None:
    """Guards against candidates with equal scores: what is new is at the end. More than the model
    takes is cut before it is tokenized."""
    reward = make("classifier")
    for length in (tiny.CONTEXT * 8, tiny.CONTEXT * MAX_TOKEN_CHARACTERS + 50):
        body = "so it goes on, " * (length // 15 + 1)
        other_end = score(reward, PROMPT, [f"{body} left", f"{body} right"]).values
        other_beginning = score(reward, PROMPT, [f"left {body}", f"right {body}"]).values
        assert abs(other_end[0] - other_end[1]) > 1e-6
        assert other_beginning[0] == pytest.approx(other_beginning[1], abs=1e-5)


def test_prompt_over_the_models_limit_is_an_invalid_request(make: Make) -> None:
    """Guards against scores of responses to a part of the prompt."""
    with pytest.raises(InvalidRequest) as failure:
        make("classifier").open(Prompt.from_user("a" * 1000))
    assert [violation.field for violation in failure.value.violations] == ["prompt"]


# Of kinds that this process awaits: data with which the texts below have different scores.
REMOTE = {"http": "", "tests": '{"compiles": true, "whole": true}'}


@pytest.mark.parametrize("name", [*KINDS, *REMOTE])
async def test_a_worker_serves_every_kind(make: Make, name: str) -> None:
    """Guards batches without new tokens, and a lone text."""
    data = (DATA | REMOTE).get(name, "")
    async with served() as endpoint:
        options: dict[str, Any] = (
            {"url": endpoint.url} if name == "http" else {"allow_unsandboxed": True}
        )
        reward = load(name, **options) if name in REMOTE else make(name)
        async with working(lambda: reward) as worker:
            assert worker.description.name == "r"
            assert worker.description.fingerprint and worker.description.description
            assert worker.description.takes_data == (name in DATA or name in REMOTE)
            async with worker.open(PROMPT, data) as session:
                candidates = batch({0: TEXT, 1: ""}, FinishReason.LENGTH)
                first = await session.score(candidates)
                again = await session.score(candidates)
                assert again.values == pytest.approx(first.values, abs=1e-4)
                assert len((await session.score(candidates[:1])).values) == 1
            whole = await worker.score(PROMPT, [TEXT, ""], data=data)
            assert whole.values != pytest.approx(first.values[::-1], abs=1e-6)
            assert worker.heartbeat_s() < 30


@pytest.mark.parametrize("option", ["directory", "head_file"])
def test_missing_file_is_an_error_with_the_rewards_name(tmp_path: Path, option: str) -> None:
    spec = {"directory": tmp_path, option: tmp_path / "gone"}
    with pytest.raises(FileNotFoundError, match=r"reward r: no .* .*gone"):
        load("classifier", **spec)


def test_options_are_in_the_fingerprint(tmp_path: Path) -> None:
    """Guards the cache against answers selected with other options."""
    changes: list[dict[str, Any]] = [
        {},
        {"special_tokens": "both"},
        {"label": 0},
        {"engine": "vllm"},
        {"engine": "vllm", "vllm_options": {"quantization": "fp8"}},
    ]
    specs = [ClassifierSpec(name="r", directory=tmp_path, **change) for change in changes]
    fingerprints = {spec.fingerprint(Resources()) for spec in specs}
    fingerprints.add(specs[0].fingerprint(Resources(device="cuda")))
    assert len(fingerprints) == len(specs) + 1
    renamed = specs[0].model_copy(update={"name": "other"})
    assert renamed.fingerprint(Resources()) in fingerprints


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    """Guards the machine against the author of a model's directory."""
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "own-llama"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran.txt"
    (tmp_path / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    with pytest.raises((ValueError, OSError)):
        load("classifier", tmp_path)
    assert not marker.exists()
