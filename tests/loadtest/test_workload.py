"""The sequence of requests and their prompts."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from loadtest.options import add_options, read_prompts
from loadtest.workload import LoadRequest, requests
from specrej.contracts import Algorithm, CacheControl

_USERS = """
import argparse
from locust.env import Environment
from loadtest.options import add_options
from loadtest.users import ApiUser

parser = argparse.ArgumentParser()
add_options(parser)
environment = Environment(host="127.0.0.1:1", parsed_options=parser.parse_args([]))
users = [ApiUser(environment), ApiUser(environment)]
for user in users:
    user.on_start()
print(*(next(user.requests).options["seed"] for user in users * 2))
"""


def first(count: int, *arguments: str, worker: int = 0) -> list[LoadRequest]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parsed = parser.parse_args(arguments)
    return list(itertools.islice(requests(parsed, worker), count))


def test_prompts_take_turns_with_new_seeds() -> None:
    """Guards against requests that the cache or single flight can answer."""
    sent = first(len(read_prompts()))
    assert {request.prompt for request in sent} == set(read_prompts())
    assert len({request.options["seed"] for request in sent}) == len(sent)
    assert {request.options["cache"] for request in sent} == {CacheControl.BYPASS}


def test_workers_use_different_seeds() -> None:
    seeds = [{r.options["seed"] for r in first(50, worker=worker)} for worker in (0, 1)]
    assert not seeds[0] & seeds[1]


def test_users_send_no_equal_requests() -> None:
    """Guards against answers of the cache. In its own process: Locust patches Python's library."""
    seeds = subprocess.check_output((sys.executable, "-c", _USERS), text=True, timeout=60).split()
    assert len(set(seeds)) == len(seeds) == 4


def test_both_algorithms_get_the_same_prompt_and_seed() -> None:
    one, other = first(2, "--algorithm", "both")
    assert [r.options["algorithm"] for r in (one, other)] == list(Algorithm)
    assert (one.prompt, one.options["seed"]) == (other.prompt, other.options["seed"])


def test_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# a comment\n\nWhy?\n  How?  \n", "utf-8")
    assert {sent.prompt for sent in first(3, "--prompts", str(path))} == {"Why?", "How?"}
