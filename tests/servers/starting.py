"""Unmodified servers of other projects as processes on loopback, each of its own environment.

They are skipped where the Makefile has not created that (`make conformance-servers` does).
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from deploy.local.stack import free_ports
from specrej_models.embedded import packaged
from tests.programs import ROOT
from tests.serving import until

MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
_READY_S, _STOP_S, _PAUSE_S = 300.0, 30.0, 0.2
_PORT = "PORT"  # in commands


def vllm_server(
    *flags: str, model: Path = MODEL, kv_gib: int = 1, is_eager: bool = True, **more: str
) -> AbstractAsyncContextManager[str]:
    """The base URL, without /v1, of `vllm serve` on a CPU; its name of the model is the path.
    `is_eager`: it compiles nothing, which takes minutes; `more`: variables of its environment."""
    python = _found(".vllm/bin/python", "make vllm")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager"] if is_eager else []
    command += ["--block-size", "32", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    cache = ROOT / ".vllm" / "numba"
    variables = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "NUMBA_CACHE_DIR": str(cache), **more}
    command += ["--host", "127.0.0.1", "--port", _PORT, *flags]
    return _running(command, "/health", **variables)


def llama_server(
    *, slots: int = 16, tokens: int = 8192, name: str = ""
) -> AbstractAsyncContextManager[str]:
    """The base URL, without /v1, of llama.cpp's server, with `slots` that share `tokens` of KV;
    `name`: of the model, which is its path otherwise."""
    python = _found(".llama/bin/python", "make conformance-servers")
    program = str(Path(__file__).with_name("llama_server.py"))
    path = str(packaged(MODEL.name))
    return _running([python, program, path, _PORT, str(slots), str(tokens), name], "/health")


def router(*servers: str) -> AbstractAsyncContextManager[str]:
    """The base URL, without /v1, of vllm-router before servers, which are ready."""
    program = _found(".router/bin/vllm-router", "make conformance-servers")
    # On a busy machine a server that answers late is not dead.
    command = [program, "--disable-circuit-breaker", "--health-failure-threshold", "99"]
    command += f"--port {_PORT} --policy consistent_hash --disable-retries".split()
    command += f"--worker-startup-check-interval 1 --prometheus-port {free_ports(1)[0]}".split()
    return _running([*command, "--worker-urls", *servers], "/readiness")


@asynccontextmanager
async def _running(command: list[str], path: str, **variables: str) -> AsyncIterator[str]:
    """The base URL of a server once it answers at `path`.

    AssertionError with the end of its output: it ends before, or is not ready in time.
    """
    port = str(free_ports(1)[0])
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **variables}
    given = [port if word == _PORT else word for word in command]
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *given, env=environment, stdout=output, stderr=output, start_new_session=True
        )

        async def answers() -> bool:
            with suppress(httpx2.HTTPError):
                return (await client.get(url + path)).status_code == 200
            return process.returncode is not None

        try:
            async with httpx2.AsyncClient(trust_env=False) as client:
                with suppress(TimeoutError):
                    await until(answers, _READY_S, _PAUSE_S)
                if not await answers() or process.returncode is not None:
                    output.seek(0)
                    raise AssertionError(output.read()[-4000:].decode(errors="replace"))
            yield url
        finally:
            with suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                await asyncio.wait_for(process.wait(), _STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
            await process.wait()


def _found(program: str, target: str) -> str:
    """The path of a program; skips the test if it does not exist."""
    path = ROOT / program
    if not path.exists():
        pytest.skip(f"no {program}: {target} installs it")
    return str(path)
