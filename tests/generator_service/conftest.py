"""Engines on tiny models, checked and stopped after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from generator_service.engine import Engine
from generator_service.model import CausalLM
from tests.generator_service import tiny

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """`make_engine(model_name, capacity, **options)`; afterwards no slot may be owned."""
    engines: list[Engine] = []

    def make(name: str = "llama", capacity: int = 5000, **options: Any) -> Engine:
        engine = Engine(CausalLM(tiny.build(name)), capacity, **options)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
        engine.check_integrity()
        assert engine.ledger.owned == 0
