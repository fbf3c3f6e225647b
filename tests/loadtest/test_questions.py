"""Which request comes next, and what prompts there are."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import pytest

from loadtest.curves import ramp, spike
from loadtest.options import add_options, counts
from loadtest.prompts import OWN_PROMPTS, read_prompts
from loadtest.questions import Question, n_of_step, questions
from specrej.contracts import Algorithm, CacheControl


def asked(count: int, *arguments: str, worker: int = 0) -> list[Question]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parsed = parser.parse_args(arguments)
    return list(itertools.islice(questions(parsed, worker, time.perf_counter()), count))


def test_prompts_take_turns_with_new_seeds() -> None:
    """Guards against requests that the service can answer from its cache, or as one flight."""
    found = asked(len(read_prompts()))
    assert {question.prompt for question in found} == set(read_prompts())
    assert len({question.options["seed"] for question in found}) == len(found)
    assert {question.options["cache"] for question in found} == {CacheControl.BYPASS}


def test_workers_never_ask_the_same() -> None:
    seeds = [{q.options["seed"] for q in asked(50, worker=worker)} for worker in (0, 1)]
    assert not seeds[0] & seeds[1]


def test_both_algorithms_get_the_same_question() -> None:
    one, other = asked(2, "--algorithm", "both")
    assert [q.options["algorithm"] for q in (one, other)] == list(Algorithm)
    assert (one.prompt, one.options["seed"]) == (other.prompt, other.options["seed"])


def test_with_the_cache_on_questions_come_back(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# a comment\n\nWhy?\n  How?  \n", "utf-8")
    one, other, again = asked(3, "--cache", "on", "--prompts", str(path))
    assert {one.prompt, other.prompt} == {"Why?", "How?"}
    assert (again.prompt, again.options) == (one.prompt, one.options)
    assert one.options["cache"] is CacheControl.USE


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n", "utf-8")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(tmp_path / "empty")


def test_own_prompts_differ() -> None:
    prompts = read_prompts(OWN_PROMPTS)
    assert len(set(prompts)) == len(prompts) >= 20


def test_each_n_has_its_turn() -> None:
    assert [n_of_step((1, 4, 16), at_s, 10) for at_s in (0, 9.9, 10, 25, 99)] == [1, 1, 4, 16, 16]


@pytest.mark.parametrize("text", ["", "0", "1,", "-3", "4;5", "1.5"])
def test_wrong_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        counts(text)


def test_shapes_of_users() -> None:
    assert [ramp(at_s, 60, 8) for at_s in (0, 30, 59.9, 60)] == [1, 5, 8, 8]
    assert [spike(at_s, 60, 40) for at_s in (0, 19.9, 20, 39.9, 40)] == [4, 4, 40, 40, 4]
    assert spike(0, 60, 5) == 1
