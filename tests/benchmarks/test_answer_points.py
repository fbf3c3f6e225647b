"""Answers of the comparison: points, differences, table, picture, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answer_points import (
    HEADINGS,
    PAIRED_HEADINGS,
    Answer,
    Point,
    complete,
    differences,
    paired_rows,
    points,
    table_rows,
    write_picture,
)
from benchmarks.answer_record import Record

ANSWER = Answer("vllm", 4, "one", 2.0, 100, 0.5, -1.0, "three short words")
SETTINGS = {"max_tokens": 8, "reward": "relevance", "machine": {"cores": 2}}


def _answers(rewards: list[float]) -> list[Answer]:
    return [
        replace(ANSWER, prompt_id=str(i), reward=reward, tokens=100 + i)
        for i, reward in enumerate(rewards)
    ]


def test_point_is_the_mean_over_prompts_with_its_interval() -> None:
    (point,) = points(_answers([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert (point.prompts, point.seconds, point.tokens, point.words) == (5, 2.0, 102.0, 3.0)
    assert (point.reward, point.second_judge) == (0.3, -1.0)
    assert point.reward_low is not None
    assert point.reward_high is not None
    assert 0.1 <= point.reward_low < 0.3 < point.reward_high <= 0.5
    (few,) = points(_answers([0.1, 0.2, 0.3]))
    assert few.reward_low is few.reward_high is None  # NaN is no JSON


def test_case_that_failed_later_is_a_row_and_no_point() -> None:
    """A mean over the prompts before the failure would be compared with one over all."""
    answers = [*_answers([0.1, 0.2]), replace(ANSWER, n=8)]
    unavailable = {("vllm", 4): "out of memory", ("optillm", 4): "optillm does not start: none"}
    measured = points(complete(answers, unavailable))
    assert [(point.system, point.n) for point in measured] == [("vllm", 8)]
    rows = list(table_rows(measured, {"vllm": "server"}, unavailable))
    assert {len(row) for row in rows} == {len(HEADINGS)}
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("vllm", 8, "server"),
        ("vllm", 4, "not available: out of memory"),
        ("optillm", 4, "not available: optillm does not start: none"),
    ]


def test_points_are_of_prompts_that_all_answered() -> None:
    """Guards an interrupted run, in which the first systems answered one prompt more."""
    first, second = (replace(ANSWER, prompt_id=name) for name in ("first", "second"))
    others = [replace(first, n=8), replace(first, system="specrej"), replace(second, n=8)]
    some = replace(first, system="optillm")
    answers = [first, second, *others, some]
    assert complete(answers, sparse=["optillm"]) == [first, *others[:2], some]
    assert complete(answers, [("specrej", 4)], ["optillm"]) == [first, second, *others[::2], some]
    assert complete([some, replace(some, prompt_id="second")], sparse=["optillm"]) != []
    assert complete([]) == []


def test_differences_are_paired_by_prompt_with_the_largest_base() -> None:
    """Guards against means over different prompts, and against prompts in another order."""
    rewards = {str(number): 0.1 * number for number in range(6)}
    theirs = [
        replace(ANSWER, n=n, prompt_id=name, reward=reward, seconds=4.0, tokens=200)
        for n in (4, 64)
        for name, reward in rewards.items()
    ]
    ours = [
        replace(ANSWER, system="specrej", prompt_id=name, reward=reward + 0.5, second_judge=0.5)
        for name, reward in reversed([*rewards.items()][1:])
    ]
    smaller, own = differences([*theirs, *ours])
    assert (smaller.system, smaller.n, smaller.base, smaller.reward) == ("vllm", 4, "vllm n=64", 0)
    assert (own.system, own.n, own.base, own.prompts) == ("specrej", 4, "vllm n=64", 5)
    assert (own.reward, own.reward_low, own.reward_high) == (0.5, 0.5, 0.5)
    assert (own.second_judge, own.second_judge_low) == (1.5, 1.5)
    assert (own.seconds_ratio, own.tokens_ratio) == (0.5, 0.5)
    rows = [*paired_rows([own])]
    assert [*map(len, rows)] == [len(PAIRED_HEADINGS)]
    assert rows[0][3:5] == ("+0.500 0.500 .. 0.500", "+1.500 1.500 .. 1.500")
    assert differences(ours) == []
    (few,) = differences([*theirs[6:], *ours[:3]])
    assert (few.prompts, few.reward, few.reward_low) == (3, 0.5, None)


def test_picture_is_drawn_from_recorded_points(tmp_path: Path) -> None:
    line: dict[str, Any] = json.loads(json.dumps(asdict(points(_answers([0.1, 0.5, 0.3, 0.2]))[0])))
    recorded = Point(**line)
    without_interval = replace(recorded, n=8, reward_low=None, reward_high=None)
    path = tmp_path / "new" / "answer.svg"
    write_picture(path, [recorded, without_interval, replace(recorded, system="specrej")], "title")
    intervals = '<g id="LineCollection_'
    assert path.read_text().count(intervals) == 2 * 2  # systems, costs
    write_picture(path, [], "nothing is available")
    assert intervals not in path.read_text()


def test_a_record_continues_its_own_file_only(tmp_path: Path) -> None:
    """Guards against answers of two models or machines in one curve."""
    path = tmp_path / "new" / "answer.json"
    first = Record(path)
    first.resume(SETTINGS)
    first.answers.append(ANSWER)
    first.unavailable["optillm", 4] = "no answer in time"
    first.versions["vllm"] = {"vllm": "1"}
    first.store()
    again = Record(path)
    again.resume(SETTINGS)
    assert (again.answers, again.versions) == ([ANSWER], first.versions)
    assert again.unavailable == {}  # it is tried again
    other = SETTINGS | {"max_tokens": 16, "machine": {"cores": 4}}
    with pytest.raises(ValueError, match=rf"{path} .*another max_tokens, machine: move it away"):
        Record(path).resume(other)
    for text in ("{}", "{"):  # of an earlier version, or cut off
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path} .*move it away"):
            Record(path).resume(SETTINGS)


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hours of answers against Ctrl-C in the wrong moment."""

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    record = Record(tmp_path / "answer.json")
    record.resume(SETTINGS)
    record.store()
    before = record.path.read_text()
    monkeypatch.setattr(Path, "replace", interrupted)
    record.answers.append(ANSWER)
    with pytest.raises(KeyboardInterrupt):
        record.store()
    assert record.path.read_text() == before
