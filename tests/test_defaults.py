"""Defaults of different services that must fit together."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from deploy.local import __main__ as local
from gateway import page
from gateway.settings import GatewaySettings
from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings
from specrej.contracts import Branching, Prompt, Schedule, Selection

FOLDER = Path(page.__file__).parent
PAGE, ASK = ((FOLDER / name).read_text() for name in ("index.html", "ask.js"))


def test_defaults_of_services_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a lease of a minute, which ended long Best-of-N requests because a scoring
    session is idle while the generator works; default limits that refuse each other's largest
    request; and a backend's default deadline that ends calls of its orchestrator early."""
    for service in ("GENERATOR", "ORCHESTRATOR", "REWARD"):
        monkeypatch.delenv(f"SPECREJ_{service}_LEASE_S", raising=False)
        monkeypatch.delenv(f"SPECREJ_{service}_DEADLINE_S", raising=False)
    generator, reward = GeneratorSettings(), RewardSettings()
    longest_s = OrchestratorSettings().deadline_s
    assert reward.lease_s > longest_s
    assert reward.max_batch >= generator.max_candidates
    assert min(generator.deadline_s, reward.deadline_s) > longest_s


async def test_what_is_claimed_is_measured_with_the_default_selection() -> None:
    """Guards against figures of another objective than users get: README's lead over Best-of-N was
    measured by reward alone, while requests preferred complete answers by default."""
    # Only here, as every process of the tests would load it.
    from benchmarks import answer

    selection, options = asdict(Selection()), {field.name for field in fields(Selection)}
    assert selection["prefer_complete"] is False, "replays and vLLM's best of N are by reward alone"
    sent: dict[str, set[str]] = {}
    for system, chosen in answer.OURS.items():
        client = AsyncMock()
        item = answer.Item("", 0, Prompt.from_user("?"))
        await answer.ask_services(client, chosen, "r", item, 4, 8)
        sent[system] = options.intersection(client.generate.call_args.kwargs) - {"n", "rewards"}
    changed = {"specrej-branching": {"branching"}, "specrej-best-of-n": {"algorithm"}}
    assert sent == {"specrej": set(), **changed}
    preset = GatewaySettings().presets["sr-32"].model_dump(exclude_none=True)
    assert options.intersection((*preset, *local._OPTIONS)) == {"n"}
    inputs = dict(re.findall(r'<input name="(\w+)" type="number"[^>]* value="([\d.]+)"', PAGE))
    values = {**selection, **asdict(Schedule()), **asdict(Branching())}  # the form's first is a cut
    shown = {name: float(value) for name, value in inputs.items() if name in values}
    assert shown == {name: values[name] for name in shown} and len(shown) == 6
    assert "prefer_complete" not in ASK
