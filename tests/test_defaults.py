"""Defaults of different services that must fit together."""

from __future__ import annotations

import pytest

from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings


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
