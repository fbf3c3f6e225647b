"""Check a service's settings instead of starting it: `python -m tests.documents.configured`.

Without arguments the settings of all services, from the environment; with the name of a service,
its own, also from the flags that follow.
"""

from __future__ import annotations

import sys

from gateway.settings import GatewaySettings
from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings
from specrej.settings import ProcessSettings, load

SETTINGS: dict[str, type[ProcessSettings]] = {
    "orchestrator": OrchestratorSettings,
    "generator_service": GeneratorSettings,
    "reward_service": RewardSettings,
    "gateway": GatewaySettings,
}

if __name__ == "__main__":
    names = sys.argv[1:2] or list(SETTINGS)
    for name in names:
        load(SETTINGS[name], sys.argv[2:])
