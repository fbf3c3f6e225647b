"""A classifier on disk, and one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.reward_service.tiny import save


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and a head of one label."""
    return save(tmp_path_factory.mktemp("classifier"))
