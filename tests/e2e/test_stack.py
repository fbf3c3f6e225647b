"""Real processes, models and Redis-protocol server: answers by every client.

Killed processes, in every phase of a request: tests/faults, on toys.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from deploy.local.stack import Ports, Stack
from specrej import Client, Schedule
from specrej.contracts import Algorithm, CacheControl, Options
from tests.programs import ROOT, outcome_of, run, started

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

BIN = Path(sys.executable).parent
OPTIONS = Options(
    n=16, max_tokens=16, schedule=Schedule(first=4), seed=3, cache=CacheControl.BYPASS
)
PROMPT = "Explain why leaves are green."


async def test_speculative_rejection_makes_fewer_tokens_than_best_of_n(stack: Stack) -> None:
    """The main claim, measured: both algorithms run with the same N and seed."""
    async with Client(stack.orchestrator_address) as client:
        options = OPTIONS | Options(seed=1, ignore_eos=True)
        speculative = await client.generate(PROMPT, **options)
        options["algorithm"] = Algorithm.BEST_OF_N
        best_of_n = await client.generate(PROMPT, **options)
    assert best_of_n.usage.generated_tokens == 16 * 16
    assert speculative.usage.generated_tokens == 16 * 4 + 8 * 4 + 4 * 8
    assert speculative.usage.best_of_n_tokens_estimate == 16 * 16
    # A survivor's text is that of the uncut run; only rejected candidates differ.
    assert speculative.best.score <= best_of_n.best.score + 1e-4
    assert [trace.num_live for trace in speculative.rounds] == [8, 4, 0]


async def test_the_command_line(stack: Stack) -> None:
    specrej, address = BIN / "specrej", ("--address", stack.orchestrator_address)
    flags = ("--reward", "relevance,batch", "--reward", "harmless=0.5,veto=1e6", "-n", "8")
    code, out, err = await outcome_of(
        specrej, "generate", PROMPT, *address, *flags, "--max-tokens", "18", "--json"
    )
    answer = json.loads(out)
    assert (code, answer["n"], answer["rounds"][0]["decision_token"]) == (0, 8, 16)
    assert "round 1" in err and "vetoed" in err
    best = answer["candidates"][0]
    assert best["vetoed"]  # no answer reaches the veto limit: the best one is returned, flagged
    assert len(best["rewards"]) == 2
    code, out, err = await outcome_of(specrej, "generate", PROMPT, *address, "--alpha", "1.5")
    assert (code, out) == (2, "")
    assert "selection.alpha" in err and len(err.splitlines()) == 1
    code, out, _ = await outcome_of(
        specrej, "score", *address, "--prompt", "How do plants eat?",
        "Plants make food from light.", "My car is red.", "--json",
    )  # fmt: skip
    good, bad = json.loads(out)["scores"]
    assert good > bad


@pytest.mark.long
async def test_the_printed_structured_output(stack: Stack) -> None:
    """Guards against a command in docs/structured.md that fails; the toy has no JSON."""
    page = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")
    command = re.search(r"^```sh\n(\.venv/bin/specrej [\s\S]*?)^```$", page, re.MULTILINE)
    assert command
    address = stack.orchestrator_address
    out = await run("bash", "-euc", command[1], SPECREJ_ADDRESS=address)
    assert json.loads(out)["sky"] in ("clear", "cloudy")


@pytest.mark.long
async def test_own_models_in_one_line(tmp_path: Path) -> None:
    """Guards against settings that only the environment has."""
    from tests.reward_service import tiny  # only here: it imports torch

    model, reward = tmp_path / "tiny-lm", tmp_path / "Tiny_Reward"
    tiny.save_language_model(model)
    tiny.save(reward)
    ports = Ports.free()
    words = (
        f"--model {model} --reward {reward} --port {ports.orchestrator} --generator-port "
        f"{ports.generator} --reward-port {ports.reward} --redis-port {ports.redis} --gateway-port "
        f"{ports.gateway} --metrics-port {Ports.free().orchestrator}"  # and the three after it
    ).split()
    async with started(BIN / "specrej", "up", *words, until="Ctrl-C") as (process, _):
        async with Client(f"127.0.0.1:{ports.orchestrator}") as client:
            described = await client.describe()
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0
    assert described.generator.model == "tiny-lm"
    assert described.rewards == ("tiny_reward", "likelihood")
