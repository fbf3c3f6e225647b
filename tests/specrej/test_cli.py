"""The command line as a user meets it: a process of its own against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from specrej import contracts as c
from specrej import errors, wire
from specrej.cli import parse_reward, parse_schedule, schedule_text
from specrej.client import build_request
from specrej.rounds_view import plain_line, summary_line
from specrej.security import read_tokens
from specrej.stack import Ports
from tests.specrej.fakes import EVENTS, GENERATION, SERVICE, FakeOrchestrator, FakeReward


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


async def start(*arguments: str, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specrej.cli", *arguments),
        env={**os.environ, **environment},
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )


async def finish(process: Process, stdin: str = "") -> Outcome:
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def run(*arguments: str, stdin: str = "", **environment: str) -> Outcome:
    return await finish(await start(*arguments, **environment), stdin)


async def test_a_pipe_gets_the_answer_alone(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against progress on stdout, where only the answer belongs."""
    one = replace(GENERATION, candidates=GENERATION.candidates[:1])
    orchestrator.events = (*EVENTS[:-1], c.Finished(one))
    outcome = await run("generate", "why?", "--address", address)
    assert (outcome.code, outcome.out) == (0, "the best\n")
    rounds = [plain_line(done, 8) for done in GENERATION.rounds]
    assert outcome.err.splitlines() == [*rounds, summary_line(GENERATION), "request r1"]


async def test_flags_left_out_stay_absent(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against the command's defaults shadowing the server's."""
    outcome = await run("generate", "-", stdin="why?", SPECREJ_ADDRESS=address)
    assert outcome.code == 0
    assert orchestrator.requests == [build_request("why?")]


async def test_every_flag_reaches_the_server(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against a flag that is taken and dropped."""
    flags = (
        "--system Be brief. -n 8 --alpha 0.25 --schedule tokens:8,32 --algorithm best-of-n"
        " --reward relevance --reward likelihood=0.5,veto=-1,batch"
        " --max-tokens 64 --temperature 0.7 --top-k 50"
        " --top-p 0.9 --stop END --stop FIN --seed 7 --ignore-eos --min-tokens 5"
        " --logprobs --cache refresh --return-candidates 2"
    )
    arguments = [word.replace("Be", "Be brief.") for word in flags.split() if word != "brief."]
    outcome = await run("generate", "why?", "--address", address, *arguments)
    assert outcome.code == 0, outcome.err
    lines = ["[0.5000, candidate 3] the best", "[0.2500, candidate 1] the next"]
    assert outcome.out.splitlines() == lines
    assert orchestrator.requests == [
        build_request(
            [c.Message("system", "Be brief."), c.Message("user", "why?")],
            n=8,
            alpha=0.25,
            schedule=c.Schedule(kind="tokens", tokens=(8, 32)),
            algorithm=c.Algorithm.BEST_OF_N,
            rewards=[
                c.WeightedReward("relevance"),
                c.WeightedReward("likelihood", 0.5, c.Normalization("batch"), -1.0),
            ],
            max_tokens=64,
            temperature=0.7,
            top_k=50,
            top_p=0.9,
            stop=["END", "FIN"],
            seed=7,
            ignore_eos=True,
            min_tokens=5,
            logprobs=True,
            cache=c.CacheControl.REFRESH,
            return_candidates=2,
        )
    ]


async def test_json_is_one_object(address: str) -> None:
    """Guards against anything beside the object on stdout, and fields that are missing in it."""
    outcome = await run("generate", "why?", "--address", address, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads(
        json.dumps(wire.to_plain(wire.generation_to_wire(GENERATION)))
    )
    best = json.loads(outcome.out)["candidates"][0]
    assert (best["token_ids"], best["logprobs"]) == ([3, 1, 2], [-0.5, -0.25, -0.75])


VIOLATIONS = [
    errors.Violation("sampling.top_p", "bad"),
    errors.Violation("selection.n", "too\nbig"),
]


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (errors.InvalidRequest(VIOLATIONS), 2, "sampling.top_p: bad; selection.n: too big"),
        (errors.NotFound("no reward named x"), 2, "no reward named x"),
        (errors.DeadlineExceeded("too late"), 4, "too late"),
        (errors.Overloaded("the queue is full"), 5, "the queue is full"),
        (errors.InternalError("internal error 1f"), 1, "internal error 1f"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_is_one_line_and_a_code(
    address: str,
    orchestrator: FakeOrchestrator,
    failure: errors.SpecrejError,
    code: int,
    said: str,
) -> None:
    """Guards against stack traces for users, and scripts that cannot tell errors apart."""
    orchestrator.failures = [failure]
    outcome = await run("generate", "why?", "--address", address)
    assert outcome == Outcome(code, "", f"specrej: {said}\n")


async def test_no_server_is_code_3() -> None:
    """Guards against a user who waits for a server that is not there."""
    nobody = f"127.0.0.1:{Ports.free().orchestrator}"
    outcome = await run("describe", "--address", nobody)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith("specrej: ") and outcome.err.count("\n") == 1


async def test_bad_usage_is_code_2() -> None:
    """Guards against a misspelt schedule that is ignored."""
    outcome = await run("generate", "why?", "--schedule", "sometimes")
    assert (outcome.code, outcome.out) == (2, "")
    assert "sometimes" in outcome.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_an_interrupt_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator, number: signal.Signals, code: int
) -> None:
    """Guards against a traceback on Ctrl-C, and candidates that grow on after it."""
    orchestrator.hangs = True
    process = await start("generate", "why?", "--address", address)
    await asyncio.wait_for(orchestrator.asked.wait(), 60)
    process.send_signal(number)
    assert await finish(process) == Outcome(code, "", "")
    await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_describe(address: str) -> None:
    """Guards against facts missing from either form."""
    text, plain = await asyncio.gather(
        run("describe", "--address", address), run("describe", "--address", address, "--json")
    )
    assert "tiny (cpu float32)" in text.out and "tokens:16,64" in text.out
    assert "12 of 4,096 owned, 1,024 cached" in text.out
    assert json.loads(plain.out) == wire.to_plain(wire.service_to_wire(SERVICE))


async def test_score(reward_address: str, reward: FakeReward) -> None:
    """Guards against scores beside the wrong responses."""
    asked = ("score", "--prompt", "why?", "--reward", "length", "a", "ab\nc")
    text, plain = await asyncio.gather(
        run(*asked, SPECREJ_REWARD_ADDRESS=reward_address),
        run(*asked, "--json", SPECREJ_REWARD_ADDRESS=reward_address),
    )
    assert text.out == "  1.0000  a\n  4.0000  ab c\n"
    assert json.loads(plain.out) == {"scores": [1.0, 4.0], "computed_tokens": 7}
    assert {request.reward for request in reward.requests} == {"length"}


async def test_up_tells_of_a_taken_port() -> None:
    """Guards against a second `specrej up` that half starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = await run("up", "--redis-port", str(port), *_other_ports())
    assert outcome.code == 1
    assert f"specrej: cannot listen on port {port} (redis)" in outcome.err


def _other_ports() -> list[str]:
    free = Ports.free()
    named = {"--port": free.orchestrator, "--generator-port": free.generator}
    return [word for name, port in named.items() for word in (name, str(port))] + [
        "--reward-port",
        str(free.reward),
    ]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("memory", c.Schedule(kind="memory")),
        ("geometric", c.Schedule()),
        ("geometric:8", c.Schedule(first=8)),
        ("geometric:16,1.5", c.Schedule(first=16, factor=1.5)),
        ("tokens:16,32,64", c.Schedule(kind="tokens", tokens=(16, 32, 64))),
    ],
)
def test_schedules(text: str, schedule: c.Schedule) -> None:
    """Guards against a notation that reads back as another schedule."""
    assert parse_schedule(text) == schedule
    assert parse_schedule(schedule_text(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "memory:1", "tokens", "tokens:", "tokens:a", "geometric:1,2,3", "geometric:x"]
)
def test_bad_schedules(text: str) -> None:
    """Guards against a typing error that becomes some other schedule."""
    with pytest.raises(typer.BadParameter):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("relevance", c.WeightedReward("relevance")),
        ("likelihood=0.5", c.WeightedReward("likelihood", 0.5)),
        ("harmless=-2,veto=-1", c.WeightedReward("harmless", -2.0, veto_below=-1.0)),
        ("a,batch", c.WeightedReward("a", normalization=c.Normalization("batch"))),
        (
            "a=3,deviation=1.1,veto=0,mean=0.2",
            c.WeightedReward("a", 3.0, c.Normalization("fixed", 0.2, 1.1), 0.0),
        ),
    ],
)
def test_rewards(text: str, reward: c.WeightedReward) -> None:
    """Guards against a weight, a normalisation or a veto that is dropped."""
    assert parse_reward(text) == reward


@pytest.mark.parametrize(
    "text",
    [
        *("a=much", "a,veto", "a,veto=", "a,veto=low", "a,veto=1,veto=2", "a,veto=1=2"),
        *("a,mean=1", "a,deviation=1", "a,mean=x,deviation=1", "a,mean=1,deviation=1,batch"),
        *("a,batch=1", "a,batch,batch", "a,", "a,batched", "a,weight=2"),
    ],
)
def test_bad_rewards(text: str) -> None:
    """Guards against a typing error that becomes some other reward; the syntax is told."""
    with pytest.raises(typer.BadParameter, match=r"NAME\[=WEIGHT\]\[,veto=X\]"):
        parse_reward(text)


async def test_vetoed_answers_are_marked(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against a vetoed answer that looks like any other."""
    first, second = GENERATION.candidates
    made = replace(GENERATION, candidates=(first, replace(second, vetoed=True)))
    orchestrator.events = (*EVENTS[:-1], c.Finished(made))
    outcome = await run("generate", "why?", "--address", address, "--return-candidates", "2")
    lines = ["[0.5000, candidate 3] the best", "[0.2500, candidate 1, vetoed] the next"]
    assert outcome.out.splitlines() == lines


async def test_a_made_token_goes_to_stdout_and_its_line_elsewhere(tmp_path: Path) -> None:
    """Guards scripts: stdout is the token alone, the file never holds it."""
    outcome = await run("token", "acme")
    token, line = outcome.out.strip(), json.loads(outcome.err)
    assert outcome.code == 0
    assert line == {"tenant": "acme", "sha256": hashlib.sha256(token.encode()).hexdigest()}
    path = tmp_path / "tokens"
    for tenant in ("edge", "ops"):
        outcome = await run("token", tenant, *("--role", "admin", "--append", str(path)))
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.strip() not in path.read_text()
    assert [entry.caller.tenant for entry in read_tokens(path)] == ["edge", "ops"]
    assert path.stat().st_mode & 0o077 == 0
    assert (await run("token", "acme", "--role", "king")).code == 2
    assert (await run("token", "acme", "--append", str(tmp_path))).code == 1


async def test_credentials_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    """Guards against a traceback, and against a token that leaves the machine in plaintext."""
    far = ("describe", "--address", "example.com:1")
    outcome = await run(*far, SPECREJ_TOKEN="t")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "in plaintext" in outcome.err
    outcome = await run(*far, "--token-file", str(tmp_path / "gone"))
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    outcome = await run(*far, "--tls-ca", str(tmp_path / "gone"))
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
