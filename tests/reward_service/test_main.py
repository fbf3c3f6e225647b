"""The process: start, readiness, stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from reward_service.catalog import load_reward
from reward_service.settings import RelevanceSpec, RewardSettings, ToySpec

TOY = '[{"name": "toy", "kind": "toy"}]'


async def start(rewards: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reward_service", "--port", "0", "--rewards", rewards),
        stderr=asyncio.subprocess.PIPE,
    )


async def test_sigterm_ends_it_with_0() -> None:
    process = await start(TOY)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (line := await process.stderr.readline()).rstrip().endswith(b"serving"):
            assert line, "ended before it served"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_missing_model_directory_ends_it_with_one_clear_line(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    rewards = f'[{{"name": "r", "kind": "relevance", "directory": "{missing}"}}]'
    process = await start(rewards)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode == 1
    lines = errors.decode().splitlines()
    assert lines[-1] == f"reward service: reward r: no model directory {missing}"
    assert not any("Traceback" in line for line in lines)


def test_specs_become_the_rewards_they_name(minilm: Path) -> None:
    """Guards the wiring: names, directories and settings reach the model."""
    settings = RewardSettings(threads=1)
    toy = load_reward(ToySpec(name="t", kind="toy"), settings)
    assert (toy.name, "toy" in toy.description) == ("t", True)
    spec = RelevanceSpec(name="close", kind="relevance", directory=minilm)
    relevance = load_reward(spec, settings)
    assert (relevance.name, "MiniLM" in relevance.description) == ("close", True)
    assert relevance.token_budget == settings.token_budget
