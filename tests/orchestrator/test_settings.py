"""Settings of all three services: a bad one ends the process before anything starts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from generator_service import __main__ as generator
from orchestrator import __main__ as orchestrator
from orchestrator.composition import Composite
from orchestrator.settings import OrchestratorSettings
from reward_service import __main__ as reward
from specrej.contracts import Normalization, Schedule, WeightedReward
from specrej.settings import load

MAINS: dict[str, Callable[[], None]] = {
    "generator": generator.main,
    "orchestrator": orchestrator.main,
    "reward": reward.main,
}


def composites(rewards: Sequence[object] = ({"name": "a"},), name: str = "balanced") -> str:
    """The setting with one composite."""
    return json.dumps([{"name": name, "rewards": rewards}])


TOO_LOW = "greater than or equal to"
TOO_HIGH = "less than or equal to"
# Service, setting, bad values, what is accepted.
BAD: list[tuple[str, str, tuple[str, ...], str]] = [
    *(
        (service, name, values, accepted)
        for service in MAINS
        for name, values, accepted in (
            ("port", ("-1",), f"{TOO_LOW} 0"),
            ("port", ("65536",), f"{TOO_HIGH} 65535"),
            ("port", ("http", "1.5"), "valid integer"),
            ("grace_s", ("0", "-1"), "greater than 0"),
            ("grace_s", ("nan", "inf"), "finite"),
            ("reflection", ("maybe",), "boolean"),
            ("log_level", ("LOUD", "info"), "DEBUG|INFO|WARNING|ERROR"),
        )
    ),
    ("orchestrator", "max_running", ("0", "-3"), f"{TOO_LOW} 1"),
    ("orchestrator", "max_queued", ("-1",), f"{TOO_LOW} 0"),
    ("orchestrator", "deadline_s", ("0",), "greater than 0"),
    ("orchestrator", "deadline_s", ("inf", "nan"), "finite"),
    ("orchestrator", "cache_ttl_s", ("0",), "greater than 0"),
    ("orchestrator", "cache_timeout_s", ("-0.1",), "greater than 0"),
    ("orchestrator", "generator_address", ("", "localhost", "a b:1", ":"), "pattern"),
    ("orchestrator", "reward_address", ("", "host:port"), "pattern"),
    ("orchestrator", "redis_url", ("http://x", "localhost:6379"), "redis:// or rediss://"),
    ("orchestrator", "redis_url", ("redis://x:port", "redis://x:99999"), "ort"),
    ("orchestrator", "redis_password_file", ("/nowhere/p", "/tmp"), "a file that is there"),
    ("orchestrator", "redis_ca", ("/nowhere/ca.pem",), "a file that is there"),
    ("orchestrator", "redis_ca", (__file__,), "rediss://"),
    ("orchestrator", "redis_key", (__file__,), "rediss://"),
    ("orchestrator", "cache_stale_s", ("-1",), f"{TOO_LOW} 0"),
    ("orchestrator", "cache_stale_s", ("inf", "nan"), ""),
    ("orchestrator", "shared_flights", ("maybe",), "boolean"),
    ("orchestrator", "default_schedule", ("soon",), "default_schedule"),
    ("orchestrator", "default_schedule", ('{"kind": "soon"}',), "memory, tokens, geometric"),
    ("orchestrator", "default_schedule", ('{"first": 0}',), "1 or more"),
    ("orchestrator", "default_schedule", ('{"factor": 1}', '{"factor": 17}'), "1.01 .. 16"),
    ("orchestrator", "default_schedule", ('{"kind": "tokens", "tokens": [8, 8]}',), "ascending"),
    ("orchestrator", "default_schedule", ('{"kind": "tokens"}',), "1 .. 1024"),
    ("orchestrator", "default_schedule", ('{"frist": 8}',), "Unexpected"),
    ("orchestrator", "composites", ("balanced",), "composites"),
    ("orchestrator", "composites", (composites([]), composites([{"name": ""}])), "balanced"),
    ("orchestrator", "composites", (composites(name="Balanced"),), "'Balanced'.name must match"),
    ("orchestrator", "composites", (composites(name="likelihood"),), "not be likelihood"),
    ("orchestrator", "composites", (composites([{"name": "a"}, {"name": "a"}]),), "name once"),
    (
        "orchestrator",
        "composites",
        (composites([{"name": "a"}, {"name": "b", "weight": 0}]),),
        "'balanced'.rewards[1].weight must be -1e+06 .. 1e+06 and not 0",
    ),
    (
        "orchestrator",
        "composites",
        (composites([{"name": "a", "veto_below": 1e13}]),),
        "'balanced'.rewards[0].veto_below must be -1e+12 .. 1e+12",
    ),
    (
        "orchestrator",
        "composites",
        (composites([{"name": "a", "normalization": {"kind": "fixed", "deviation": 0}}]),),
        "'balanced'.rewards[0].normalization.fixed.deviation must be 1e-12 .. 1e+12",
    ),
    (
        "orchestrator",
        "composites",
        (composites([{"name": "a", "normalization": {"kind": "bath"}}]),),
        "'balanced'.rewards[0].normalization.kind must be one of none, fixed, batch",
    ),
    (
        "orchestrator",
        "composites",
        (composites([{"name": "a", "normalization": {"mean": 3}}]),),
        "only if its kind is fixed",
    ),
    ("orchestrator", "composites", (composites([{"name": "balanced"}]),), "is a composite"),
    ("orchestrator", "composites", (composites([{"name": "a", "wait": 2}]),), "Unexpected"),
    ("generator", "device", ("tpu", "cuda:x"), "auto|cpu|cuda"),
    ("generator", "threads", ("-1",), f"{TOO_LOW} 0"),
    ("generator", "threads", ("1025",), f"{TOO_HIGH} 1024"),
    ("generator", "kv_slots", ("-1",), f"{TOO_LOW} 0"),
    ("generator", "memory_fraction", ("0",), "greater than 0"),
    ("generator", "memory_fraction", ("0.96", "inf"), f"{TOO_HIGH} 0.95"),
    ("generator", "memory_fraction", ("nan",), "0"),
    ("generator", "max_candidates", ("0",), f"{TOO_LOW} 1"),
    ("generator", "max_candidates", ("65537",), f"{TOO_HIGH} 65536"),
    ("generator", "auto_candidates", ("0",), f"{TOO_LOW} 1"),
    ("generator", "max_waiting", ("-1",), f"{TOO_LOW} 0"),
    ("generator", "prefill_chunk", ("0",), f"{TOO_LOW} 1"),
    ("generator", "lease_s", ("0",), "greater than 0"),
    ("generator", "lease_s", ("inf",), "finite"),
    ("reward", "device", ("tpu",), "cpu|cuda"),
    ("reward", "threads", ("-1",), f"{TOO_LOW} 0"),
    ("reward", "max_batch", ("0",), f"{TOO_LOW} 1"),
    ("reward", "token_budget", ("511",), f"{TOO_LOW} 512"),
    ("reward", "queue_limit", ("0", "-1"), f"{TOO_LOW} 1"),
    ("reward", "queue_limit", ("65537",), f"{TOO_HIGH} 65536"),
    ("reward", "lease_s", ("nan",), "finite"),
    ("reward", "deadline_s", ("0",), "greater than 0"),
    ("reward", "rewards", ("[]",), "at least 1"),
]


@pytest.mark.parametrize("source", ["environment", "flag"])
@pytest.mark.parametrize(("service", "name", "values", "accepted"), BAD)
def test_a_bad_value_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    service: str,
    name: str,
    values: tuple[str, ...],
    accepted: str,
    source: str,
) -> None:
    """Guards against a service that starts with something other than what was asked for."""
    monkeypatch.setattr(asyncio, "run", _started)
    for value in values:
        flags = [f"--{name.replace('_', '-')}={value}"]
        monkeypatch.setattr(sys, "argv", [service, *(flags if source == "flag" else [])])
        if source == "environment":
            monkeypatch.setenv(f"SPECREJ_{service.upper()}_{name.upper()}", value)
        with pytest.raises(SystemExit) as ended:
            MAINS[service]()
        told = capsys.readouterr().err
        assert ended.value.code == 2, value
        assert name in told, value
        assert accepted in told, (value, told)


def _started(work: Coroutine[Any, Any, None]) -> None:
    """Else a test of an accepted value would serve for ever."""
    work.close()
    raise AssertionError("the service started")


def test_all_bad_values_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against operators who mend one setting per start."""
    with pytest.raises(SystemExit):
        load(OrchestratorSettings, ["--port=-1", "--max-running=0", "--deadline-s=0"])
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in told] == ["port", "max_running", "deadline_s"]
    assert "SPECREJ_ORCHESTRATOR_MAX_RUNNING" in told[1]


def test_a_flag_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a typing mistake that leaves the default in force."""
    with pytest.raises(SystemExit) as ended:
        load(OrchestratorSettings, ["--max-runing=3"])
    assert ended.value.code == 2
    assert "--max-runing" in capsys.readouterr().err


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECREJ_ORCHESTRATOR_MAX_RUNNING", "3")
    monkeypatch.setenv("SPECREJ_ORCHESTRATOR_MAX_QUEUED", "5")
    settings = load(OrchestratorSettings, ["--max-running=4"])
    assert (settings.max_running, settings.max_queued) == (4, 5)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ('{"kind": "memory"}', Schedule("memory")),
        ('{"kind": "tokens", "tokens": [4, 9]}', Schedule("tokens", tokens=(4, 9))),
        ('{"first": 32, "factor": 1.5}', Schedule("geometric", first=32, factor=1.5)),
    ],
)
def test_schedules_of_every_kind(text: str, schedule: Schedule) -> None:
    """Guards against a check that refuses what the manual promises."""
    assert load(OrchestratorSettings, ["--default-schedule", text]).default_schedule == schedule


MANUAL = """
[{"name": "balanced", "rewards": [
  {"name": "helpful", "normalization": {"kind": "fixed", "mean": 0.2, "deviation": 1.1}},
  {"name": "harmless", "weight": 0.5, "normalization": {"kind": "batch"}, "veto_below": -1}
]}]"""


@pytest.mark.parametrize("source", ["environment", "flag"])
def test_composites(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Guards against the manual's own example being refused, or read as something else."""
    monkeypatch.setenv(
        "SPECREJ_ORCHESTRATOR_COMPOSITES", MANUAL if source == "environment" else "[]"
    )
    flags = ["--composites", MANUAL] if source == "flag" else []
    helpful = WeightedReward("helpful", 1.0, Normalization("fixed", 0.2, 1.1))
    harmless = WeightedReward("harmless", 0.5, Normalization("batch"), -1.0)
    expected = (Composite("balanced", (helpful, harmless)),)
    assert load(OrchestratorSettings, flags).composites == expected
    example = " ".join(MANUAL.split())
    assert example in " ".join((OrchestratorSettings.__doc__ or "").split())


def test_composites_that_share_rewards() -> None:
    """Guards against names that must be unique in one composite being so in all."""
    both = [json.loads(composites(name=name))[0] for name in ("one", "two")]
    loaded = load(OrchestratorSettings, ["--composites", json.dumps(both)]).composites
    assert [composite.name for composite in loaded] == ["one", "two"]
    assert loaded[0].rewards == loaded[1].rewards == (WeightedReward("a"),)


def test_composites_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against one that silently wins; a composite in a composite is one too many, too."""
    both = [json.loads(composites(name="one"))[0]] * 2
    nested = json.loads(composites(rewards=[{"name": "one"}], name="two"))
    with pytest.raises(SystemExit):
        load(OrchestratorSettings, ["--composites", json.dumps(both + nested)])
    told = capsys.readouterr().err
    assert "bad setting composites" in told
    assert "'one'.name must be there once" in told
    assert "'two'.rewards[0].name must be a reward, one is a composite" in told


@pytest.mark.parametrize("url", ["", "redis://h:6379/0", "rediss://:secret@h", "unix:///run/r"])
def test_urls_of_every_kind(url: str) -> None:
    """Guards against the same."""
    assert load(OrchestratorSettings, ["--redis-url", url]).redis_url == url


@pytest.mark.parametrize("service", list(MAINS))
def test_help_is_the_manual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: str
) -> None:
    """Guards against a manual that does not say how settings are named."""
    monkeypatch.setattr(sys, "argv", [service, "--help"])
    with pytest.raises(SystemExit) as ended:
        MAINS[service]()
    assert ended.value.code == 0
    assert f"SPECREJ_{service.upper()}_" in capsys.readouterr().out


def test_a_token_for_backends_needs_tls_beyond_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards against an orchestrator that shows its token to the network, or starts without it."""
    file = tmp_path / "token"
    flags = ["--backend-token-file", str(file), "--reward-address", "rewards:50052"]
    for content, told in ((None, "No such file"), ("", "bearer token"), ("t", "in plaintext")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(SystemExit):
            load(OrchestratorSettings, flags)
        assert told in capsys.readouterr().err
    for more in ("--backend-tls", "--backend-allow-plaintext-token"):
        credentials = load(OrchestratorSettings, [*flags, more]).backend_credentials
        assert credentials["token_file"] == str(file)
