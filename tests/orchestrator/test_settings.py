"""Settings of the orchestrator and the generator, and numbers in those of all services."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from generator_service import __main__ as generator
from generator_service.settings import GeneratorSettings
from orchestrator import __main__ as orchestrator
from orchestrator.settings import OrchestratorSettings
from reward_service import __main__ as reward
from reward_service.settings import RewardSettings
from specrej.contracts import Normalization, WeightedReward
from specrej.settings import ServiceSettings, load

MAINS: dict[str, Callable[[], None]] = {
    "generator": generator.main,
    "orchestrator": orchestrator.main,
    "reward": reward.main,
}


TOO_HIGH = "less than or equal to"
# Flags, and a part of the error. Those of the orchestrator cover what all services share.
INVALID_OF_ORCHESTRATOR = [
    ("--port=65536", f"{TOO_HIGH} 65535"),
    ("--deadline-s=4000", "at most max_deadline_s"),
    ("--max-deadline-s=599", "at most max_deadline_s"),
    ("--log-level=info", "DEBUG|INFO|WARNING|ERROR"),
    *((f"--generator-address={text}", "pattern") for text in ("", "localhost", "a b:1", ":")),
    ("--reward-address=host:port", "pattern"),
    *(
        (f"--redis-url={url}", "must be redis://, rediss:// or unix:// with a valid host and port")
        for url in (
            *("http://x", "localhost:6379", "redis://x:99999"),
            *(f"redis://h/0?{option}" for option in ("db=x", "colour=1", "timeout=1")),
            # Passwords that should have been escaped.
            *("redis://:s3cr3t/x@h:6379/0", "redis://:s3cr3t?x@h:6379/0"),
        )
    ),
    *((f"--redis-password-file={p}", "a file that is there") for p in ("/nowhere/p", "/tmp")),
    ("--cache-secret-file=/nowhere/secret", "a file that is there"),
    (f"--cache-secret-file={Path(__file__).with_name('__init__.py')}", "32 to 4096 bytes"),
    ("--default-schedule=soon", "default_schedule"),
    ('--default-schedule={"first": 0}', "1 or more"),
    ('--default-schedule={"factor": 17}', "1.01 .. 16"),
    ('--default-schedule={"kind": "tokens", "tokens": [8, 8]}', "ascending"),
    ('--default-schedule={"frist": 8}', "Unexpected"),
    ("--default-rewards=balanced", "default_rewards"),
    (
        '--default-rewards=[{"name": "a", "weight": 0}]',
        "rewards[0].weight must be -1e+06 .. 1e+06 and not 0",
    ),
    ('--default-rewards=[{"name": "a", "wait": 2}]', "Unexpected"),
]
INVALID_OF_GENERATOR = [
    ("--device=tpu", "auto|cpu|cuda"),
    ("--device=cuda:x", "auto|cpu|cuda"),
    ("--threads=1025", f"{TOO_HIGH} 1024"),
    ("--memory-fraction=0.96", f"{TOO_HIGH} 0.95"),
    ("--max-candidates=65537", f"{TOO_HIGH} 65536"),
]
# Numbers that may be 0.
ZERO = {
    *("port", "metrics_port", "health_port", "threads", "kv_slots", "prefix_cache"),
    *("max_queued", "max_waiting", "context_tokens"),
    *("default_n", "least_bytes_s"),
}


@pytest.mark.parametrize(
    ("settings", "flag", "reason"),
    [
        *((OrchestratorSettings, *row) for row in INVALID_OF_ORCHESTRATOR),
        *((GeneratorSettings, *row) for row in INVALID_OF_GENERATOR),
    ],
)
def test_an_invalid_value_is_named_with_the_accepted_range(
    capsys: pytest.CaptureFixture[str], settings: type[ServiceSettings], flag: str, reason: str
) -> None:
    """Guards against a service that starts with other values than were set."""
    with pytest.raises(SystemExit) as ended:
        load(settings, [flag])
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert flag.removeprefix("--").partition("=")[0].replace("-", "_") in message
    assert reason in message and "s3cr3t" not in message


@pytest.mark.parametrize("settings", [OrchestratorSettings, GeneratorSettings, RewardSettings])
def test_no_number_is_negative_infinite_or_nan(
    capsys: pytest.CaptureFixture[str], settings: type[ServiceSettings]
) -> None:
    """Guards against waits without an end, and limits that refuse or admit everything."""
    fields = settings.model_fields.items()
    numbers = [name for name, field in fields if field.annotation in (int, float)]
    assert len(numbers) > 10
    positive = [name for name in numbers if name not in ZERO]
    for value, names in (("-1", numbers), ("nan", numbers), ("inf", numbers), ("0", positive)):
        with pytest.raises(SystemExit):
            load(settings, [f"--{name.replace('_', '-')}={value}" for name in names])
        lines = capsys.readouterr().err.splitlines()
        assert [re.findall(r"bad setting (\w+)", line) for line in lines] == [[n] for n in names]


@pytest.mark.parametrize("source", ["environment", "flag"])
@pytest.mark.parametrize("service", list(MAINS))
def test_an_invalid_value_ends_the_process_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: str, source: str
) -> None:
    def started(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise AssertionError("the service started")

    monkeypatch.setattr(asyncio, "run", started)
    monkeypatch.setattr(sys, "argv", [service, *(["--port=-1"] if source == "flag" else [])])
    if source == "environment":
        monkeypatch.setenv(f"SPECREJ_{service.upper()}_PORT", "-1")
    with pytest.raises(SystemExit) as ended:
        MAINS[service]()
    assert ended.value.code == 2
    assert f"SPECREJ_{service.upper()}_PORT" in capsys.readouterr().err


def test_a_password_of_redis_is_there_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a password file that is not used."""
    for url in ("redis://:p@h", "redis://h?password=p"):
        with pytest.raises(SystemExit):
            load(OrchestratorSettings, [f"--redis-url={url}", f"--redis-password-file={__file__}"])
        assert "not in both" in capsys.readouterr().err


MANUAL = """
[{"name": "helpful", "normalization": {"kind": "batch"}},
 {"name": "harmless", "weight": 0.5, "normalization": {"kind": "batch"}, "veto_below": -1}]"""


@pytest.mark.parametrize("source", ["environment", "flag"])
def test_the_manuals_rewards_are_accepted(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """From either source; a flag overrides the environment."""
    is_flag = source == "flag"
    monkeypatch.setenv("SPECREJ_ORCHESTRATOR_DEFAULT_REWARDS", "[]" if is_flag else MANUAL)
    settings = load(OrchestratorSettings, ["--default-rewards", MANUAL] if is_flag else [])
    helpful = WeightedReward("helpful", 1.0, Normalization("batch"))
    harmless = WeightedReward("harmless", 0.5, Normalization("batch"), -1.0)
    assert settings.default_rewards == (helpful, harmless)
    example = " ".join(MANUAL.split())
    assert example in " ".join((OrchestratorSettings.__doc__ or "").split())


def test_a_token_for_backends_needs_tls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards against a token that is sent in plaintext over a network, or not sent."""
    file = tmp_path / "token"
    flags = ["--backend-token-file", str(file), "--reward-address", "rewards:50052"]
    for content, reason in ((None, "No such file"), ("", "bearer token"), ("t", "in plaintext")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(SystemExit):
            load(OrchestratorSettings, flags)
        assert reason in capsys.readouterr().err
    for flag in ("--backend-tls", "--backend-allow-plaintext-token"):
        credentials = load(OrchestratorSettings, [*flags, flag]).backend_credentials
        assert credentials["token_file"] == str(file)
