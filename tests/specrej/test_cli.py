"""The command line against real servers: in this process, or as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from specrej import contracts as c
from specrej.client import Client, cli
from specrej.client.client import build_request
from specrej.client.options import add_options
from specrej.client.view import plain_line, summary_line
from specrej.contracts import Options, errors, wire
from specrej.server.serving import Server, Service
from specrej.settings import ServiceSettings
from tests.certificates import Authority
from tests.programs import outcome_of
from tests.specrej.conftest import Command
from tests.specrej.fakes import EVENTS, GENERATION, ONE, OPTIONS, SERVICE, FakeOrchestrator

HEALTH_NAME = "specrej.v1.SomeService"
ABSENT = "127.0.0.1:1"  # nothing listens there
VETO = c.WeightedReward("likelihood", 0.5, c.Normalization("batch"), -1.0)
FLAGS: Options = {
    **OPTIONS,
    "rewards": [c.WeightedReward("relevance"), VETO],
    "stop": ["END", "FIN"],
    "logit_bias": [c.TokenBias(7, -100.0), c.TokenBias(8, 1.5)],
    "structured_output": c.JsonSchema('{"a": 1}'),
    "vote": c.Vote("regex", "a(b)"),
}


COMMAND = (sys.executable, "-m", "specrej.client.cli")
run = partial(outcome_of, *COMMAND)


async def start(*arguments: str, stdout: int = PIPE, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(*COMMAND, *arguments),
        env={**os.environ, **environment},
        stdin=PIPE,
        stdout=stdout,
        stderr=PIPE,
    )


async def test_only_the_answer_goes_to_stdout(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against progress on stdout, where only the answer belongs."""
    orchestrator.events = (*EVENTS[:-1], c.Finished(ONE))
    outcome = await run("generate", "why?", "--address", address)
    assert (outcome.returncode, outcome.stdout) == (0, "the best\n")
    rounds = [plain_line(done, 8) for done in GENERATION.rounds]
    assert outcome.stderr.splitlines() == [*rounds, summary_line(GENERATION), "request r1"]


async def test_every_flag_reaches_the_server(
    address: str, orchestrator: FakeOrchestrator, command: Command
) -> None:
    """Guards against a flag that is accepted and dropped, and an unmarked vetoed answer."""
    first, second = GENERATION.candidates
    made = replace(GENERATION, candidates=(first, replace(second, vetoed=True)))
    orchestrator.events = (*EVENTS[:-1], c.Finished(made))
    flags = (
        "-n 8 --alpha 0.25 --schedule tokens:8,32 --algorithm best-of-n"
        " --reward relevance --reward likelihood=0.5,veto=-1,batch --return-candidates 2"
        " --prefer-complete --branching 8,2,0.5 --min-answers 2"
        " --max-tokens 64 --temperature 0.7 --top-k 50 --top-p 0.9 --stop END --stop FIN"
        " --seed 7 --ignore-eos --min-tokens 5 --logprobs --model tiny --cache refresh"
        " --min-p 0.05 --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty -0.5"
        " --logit-bias 7=-100 --logit-bias 8=1.5"
        " --stop-token-ids 3 --stop-token-ids 4 --top-logprobs 2 --allow-degraded"
        " --stop-at 0.5 --waves 2 --first 3 --vote regex:a(b) --confidence-cut 0.25,16"
        " --max-thinking-tokens 32 --score-thinking"
    )
    system = ("--system", "Be brief.", "--structured-output", 'json_schema:{"a": 1}')
    out, _ = await command("generate", "why?", "--address", address, *system, *flags.split())
    lines = ["[0.5000, candidate 3] the best", "[0.2500, candidate 1, vetoed] the next"]
    assert out.splitlines() == lines
    turns = [c.Message("system", "Be brief."), c.Message("user", "why?")]
    assert orchestrator.requests == [build_request(turns, **FLAGS)]


async def test_json_is_one_object(address: str, command: Command) -> None:
    """Guards against other text on stdout, and missing fields."""
    out, _ = await command("generate", "why?", "--address", address, "--json")
    assert json.loads(out) == json.loads(json.dumps(wire.to_plain(GENERATION)))
    best = json.loads(out)["candidates"][0]
    assert (best["token_ids"], best["logprobs"]) == ([3, 1, 2], [-0.5, -0.25, -0.75])


async def test_calls_are_printed(
    address: str, orchestrator: FakeOrchestrator, command: Command
) -> None:
    """Guards against a program that must parse the model's own marks."""
    parts = c.AnswerParts("So:", "I add.", (c.ToolCall("call_3_0", "add", '{"n": 1}'),))
    best = replace(ONE.candidates[0], text="raw", parts=parts)
    orchestrator.events = (*EVENTS[:-1], c.Finished(replace(ONE, candidates=(best,))))
    out, err = await command("generate", "why?", "--address", address)
    assert out == 'So:\nadd({"n": 1})\n' and "I add." in err


TWO = [errors.Violation("sampling.top_p", "bad"), errors.Violation("selection.n", "too\nbig")]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.InvalidRequest(TWO), 2, "sampling.top_p: bad; selection.n: too big"),
        (errors.NotFound("no reward named x"), 2, "no reward named x"),
        (errors.Unavailable("down"), 3, "down"),
        (errors.DeadlineExceeded("too late"), 4, "too late"),
        (errors.Overloaded("the queue is full"), 5, "the queue is full"),
        (errors.Unauthenticated("no token"), 6, "no token"),
        (errors.InternalError("internal error 1f"), 1, "internal error 1f"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    error: errors.SpecrejError, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against stack traces for users, and scripts without distinct exit codes."""

    async def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        cli.run_to_end(fail())
    assert raised.value.code == code
    assert capsys.readouterr().err == f"specrej: {line}\n"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("generate why? --schedule x", "--schedule"),
        ("generate why? --cache never", "--cache"),
        ("generate why? --timeout -1", "--timeout"),
        ("token acme --role king", "--role"),
        ("token acme --expires tomorrow", "--expires"),
        ("describe --jsno", "--jsno"),
        ("describe --address http://localhost:8000", "use HOST:PORT"),
    ],
)
async def test_bad_usage_is_a_usage_error(
    line: str, hint: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a misspelt value that is ignored."""
    with pytest.raises(SystemExit, match="2"):
        await command(*line.split())
    printed = capsys.readouterr()
    assert printed.out == "" and hint in printed.err


def test_a_command_of_the_services_without_their_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str) -> None: ...

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["up"])
    assert "pip install 'specrej-server[cpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_missing_server_is_named_with_its_default_port(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def client(address: str, **_: object) -> Client:
        used.append(address)
        return Client(ABSENT, timeout_s=0.5)

    monkeypatch.setattr(cli, "Client", client)
    with pytest.raises(SystemExit, match="3"):
        cli.main(["describe", "--address", host])
    assert used == [f"{host}:50050"]
    assert "is a service at this --address? specrej up starts" in capsys.readouterr().err


async def test_descriptions(address: str, command: Command) -> None:
    """Guards against facts missing from either form."""
    text, _ = await command("describe", "--address", address)
    facts = {
        "generator.model: tiny",
        "generator.slots.owned: 12",
        "default_schedule.tokens: [16, 64]",
    }
    assert facts <= {*text.splitlines()}
    plain, _ = await command("describe", "--address", address, "--json")
    assert json.loads(plain) == wire.to_plain(SERVICE)


async def test_score(
    address: str, orchestrator: FakeOrchestrator, command: Command, tmp_path: Path
) -> None:
    """Guards against scores beside the wrong responses, and data that is not sent."""
    data = tmp_path / "data.json"
    data.write_text('{"answer": 4}')
    flags = ("--address", address, "--reward-data", str(data), "--reward", "length")
    arguments = ("score", *flags, "--prompt", "why?", "a", "ab\nc")
    assert (await command(*arguments))[0] == "  1.0000  a\n  4.0000  ab c\n"
    plain, _ = await command(*arguments, "--json")
    assert json.loads(plain) == {"scores": [1.0, 4.0], "computed_tokens": 7}
    assert {(sent.reward, sent.data) for sent in orchestrator.scored} == {
        ("length", '{"answer": 4}')
    }


async def test_data_of_rewards_and_stops(
    address: str, orchestrator: FakeOrchestrator, command: Command, tmp_path: Path
) -> None:
    """Guards against data that goes to another reward or nowhere, and stops that are not shown."""
    made = replace(
        GENERATION,
        candidates=(replace(GENERATION.best, vote="4", rewards=(0.5, math.nan)),) * 2,
        stopped_by=c.StopReason.VOTE,
        votes=(c.VoteShare("4", 0.75, 6), c.VoteShare("a\x1b[1m\n" + "5" * 50, 0.25, 2)),
        num_distinct=3,
        num_begun=6,
    )
    orchestrator.events = (*EVENTS[:-1], c.Finished(made))
    first, second = tmp_path / "a=b.json", tmp_path / "second"
    first.write_text("[1]")
    second.write_text('"x"')
    call = ("generate", "why?", "--address", address)
    out, shown = await command(
        *(*call, "--reward", "checks", "--reward", "judge,stage=end"),
        *("--reward-data", f"judge={second}", "--reward-data", f"checks={first}"),
    )
    assert out.splitlines()[0] == "[0.5000, candidate 3, votes 4] the best"
    assert shown.splitlines()[-5:-1] == [
        "ended early: the leading answer of the vote was safe; 6 of 8 candidates began",
        f"{'4':<40}  {'█' * 12}      75%  6",
        f"a [1m {'5' * 33}…  {'█' * 4}{' ' * 12}  25%  2",
        "and 1 other answers",
    ]
    plain, _ = await command(*call, "--reward", "answer", "--reward-data", str(first), "--json")
    assert json.loads(plain)["candidates"][0]["rewards"] == [0.5, None]
    given, alone = (request.selection for request in orchestrator.requests)
    assert [reward.data for reward in given.rewards] == ["[1]", '"x"']
    assert [(reward.name, reward.data) for reward in alone.rewards] == [("answer", "[1]")]
    for wrong in ((), ("--reward", "a", "--reward", "b")):
        with pytest.raises(errors.InvalidRequest, match="use NAME=FILE"):
            await command(*call, *wrong, "--reward-data", str(first))


def test_structured_output(tmp_path: Path) -> None:
    """A text, a file's text, or any object. Guards against a file's name taken for a schema, and no
    flag for the beginnings of answers, which are behind complete ones unless a request says no."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser.add_argument_group())

    def parsed(text: str) -> object:
        return parser.parse_args(["--structured-output", text]).structured_output

    file = tmp_path / "grammar.lark"
    file.write_text('start: "a:b"')
    assert parsed(f"grammar:@{file}") == c.Grammar('start: "a:b"')
    file.write_text("[0-9]+\n")
    assert parsed(f"regex:@{file}") == c.Regex("[0-9]+")
    assert parsed("regex:a:@b") == c.Regex("a:@b")
    assert parsed("json_object") == c.JsonObject()
    assert parser.parse_args(["--no-prefer-complete"]).prefer_complete is False
    for bad in ("", "json", "json_schema", "regex:", "json_object:{}", f"regex:@{tmp_path}/none"):
        with pytest.raises(argparse.ArgumentError):
            parsed(bad)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with mutual TLS that is not ready yet."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    settings = ServiceSettings(
        tls_cert=str(pair.cert), tls_key=str(pair.key), tls_client_ca=str(authority.path)
    )
    server = Server(settings, [Service("specrej.v1.SomeService", lambda _: None)])
    await server.start()
    yield server
    await server.stop(0)


async def test_health_follows_the_service(
    server: Server,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a probe that restarts a healthy service, or sends calls to another.

    Failures are one line, because it ends up in the events of a pod.
    """
    for name, file in (("CA", "ca"), ("CERT", "server"), ("KEY", "server")):
        kind = "key" if name == "KEY" else "pem"
        monkeypatch.setenv(f"SPECREJ_TLS_{name}", str(tmp_path / f"{file}.{kind}"))
    probe = ("health", f"localhost:{server.port}", "--service", HEALTH_NAME, "--timeout")

    async def failure(*flags: str) -> str:
        with pytest.raises(SystemExit, match="1"):
            await command(*probe, "2", *flags)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert await failure() == "specrej: NOT_SERVING"
    server.set_serving(True)
    assert await command(*probe, "inf") == ("", "")
    assert "NOT_FOUND" in await failure("--service", "unknown")
    assert "none.pem" in await failure("--tls-ca", str(tmp_path / "none.pem"))
    for name in ("CERT", "KEY"):
        monkeypatch.delenv(f"SPECREJ_TLS_{name}")
    assert "UNAVAILABLE" in await failure()


# Ends of commands: interrupts, readers that leave, narrow encodings


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_an_interrupt_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator, number: signal.Signals, code: int
) -> None:
    """Guards against a traceback on Ctrl-C, and candidates that grow on after it."""
    orchestrator.hangs = True
    process = await start("generate", "why?", "--address", address)
    await asyncio.wait_for(orchestrator.received.wait(), 60)
    process.send_signal(number)
    assert await asyncio.wait_for(process.communicate(), 60) == (b"", b"")
    assert process.returncode == code
    await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_a_text_on_stdin_must_be_utf_8(address: str) -> None:
    process = await start("generate", "-", "--address", address, PYTHONIOENCODING="utf-8")
    out, err = await asyncio.wait_for(process.communicate(b"a\xffb"), 60)
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(b"specrej: stdin: ")


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [("describe --address ADDRESS", ""), ("token acme", "1"), ("--help", "")],
)
async def test_a_reader_that_leaves_is_no_traceback(
    address: str, command: str, unbuffered: str
) -> None:
    """Guards against "Exception ignored", which Python prints if it cannot write at exit."""
    reading, writing = os.pipe()
    os.close(reading)
    words = command.replace("ADDRESS", address).split()
    process = await start(*words, stdout=writing, PYTHONUNBUFFERED=unbuffered)
    os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert err == b""


@pytest.mark.parametrize(("flags", "printed"), [((), "\\xfc"), (("--json",), "\\u00fc")])
async def test_an_answer_that_stdout_cannot_encode_is_escaped(
    address: str, orchestrator: FakeOrchestrator, flags: tuple[str, ...], printed: str
) -> None:
    """Guards an answer of minutes against a character."""
    best = replace(ONE.candidates[0], text="\xfc")
    orchestrator.events = (*EVENTS[:-1], c.Finished(replace(ONE, candidates=(best,))))
    command = ("generate", "why?", "--address", address, *flags)
    outcome = await run(*command, PYTHONIOENCODING="ascii")
    assert outcome.returncode == 0 and printed in outcome.stdout
