"""The engines under comparison as one table, and the process of each.

Peers have environments of their own, which the Makefile creates: .vllm and those in .peers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from benchmarks import worker
from deploy.local.processes import dying_with_parent
from generator_service import embedded

_REASON_CHARS = 300
VLLM, _PEERS = Path(".vllm"), Path(".peers")
_BUILD = Path("build/peers").absolute()
LOGS = _BUILD / "logs"
_ROOT = str(Path(__file__).parents[1])
# Rows of a step in vLLM at least; with more candidates all are in one step, as in ours.
VLLM_ROWS = 256
# A machine with CUDA has vLLM in this environment.
_VLLM_IS_HERE = importlib.util.find_spec("vllm") is not None
_VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(_BUILD / "vllm"),
    "TORCHINDUCTOR_CACHE_DIR": str(_BUILD / "inductor"),
}
VLLM_CPU_ENVIRONMENT = _VLLM_ENVIRONMENT | {
    # One process: with two, the idle one polls while other engines are measured.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    # This version cannot load what it stores.
    "VLLM_USE_AOT_COMPILE": "0",
    # Recommended by vLLM's manual, with the settings of its own launcher. Idle threads sleep after
    # 5 ms and take no time from the next engine.
    "LD_PRELOAD": str((VLLM / "lib/libiomp5.so").absolute()),
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}


class WorkerError(Exception):
    """A worker could not answer; the message is the reason in one line."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How to start an engine.

    kind: the class in worker.py. settings: describes it in the report. home: of its virtual
    environment; None: this one.
    """

    name: str
    kind: str
    settings: str
    options: Mapping[str, Any]
    home: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, threads: int) -> WorkerProcess:
        """Start its process, which is not ready yet.

        Raises:
            WorkerError: its environment does not exist.
        """
        return WorkerProcess(
            self.home / "bin" / "python" if self.home else Path(sys.executable),
            self.kind,
            {**self.options, "threads": threads},
            {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.environment},
            LOGS / f"{self.name}.log",
        )


def generating(model: Path, slots: int, context_tokens: int, most: int) -> list[Engine]:
    """Engines that sample a prompt, ours first.

    `slots` and `context_tokens` are those of the largest request, which has `most` candidates.
    """
    path, rows = {"model": str(model)}, {"max_num_seqs": max(VLLM_ROWS, most)}
    llamacpp = {
        "packed": str(embedded.package_directory() / embedded.WEIGHTS),
        "unpacked": str(_PEERS / "llamacpp/SmolLM2-135M-Instruct.F32.gguf"),
    }
    compiled = "float32, compiled, prefix caching in blocks of 32 tokens"
    packed = "4-bit weights below N=8, the same unpacked to float32 from there; float16 KV"
    vllm = path | {"context_tokens": context_tokens, "vllm_options": rows}
    home = None if _VLLM_IS_HERE else VLLM
    environment = _VLLM_ENVIRONMENT if _VLLM_IS_HERE else VLLM_CPU_ENVIRONMENT
    ours = {"PYTHONPATH": _ROOT}
    return [
        Engine("specrej", "Own", "float32", path | {"slots": slots}, None, ours),
        Engine("transformers", "Transformers", "float32, generate()", path),
        Engine("vllm", "VLLM", compiled, vllm, home, environment),
        Engine("llamacpp", "LlamaCpp", packed, llamacpp, _PEERS / "llamacpp"),
    ]


class WorkerProcess:
    """A process of worker.py; it ends with this process, even by SIGKILL."""

    def __init__(
        self,
        python: Path,
        kind: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the process; `ready` waits for it. Its output goes to the file `log`.

        Raises:
            WorkerError: the interpreter `python` does not exist.
        """
        if not python.exists():
            raise WorkerError(f"{python} does not exist")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = Pipe()
        serving = (worker.__file__, str(theirs.fileno()), kind, json.dumps(options))
        with log.open("wb") as stream, theirs:
            self._process = subprocess.Popen(
                dying_with_parent((str(python.absolute()), "-P", *serving)),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to this process only
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, str]:
        """Wait until the engine is loaded; its versions.

        Raises:
            WorkerError: the engine cannot be loaded, or the process ended.
        """
        versions: dict[str, str] = self._reply()["ready"]
        return versions

    def measure(self, request: Mapping[str, Any]) -> float:
        """The seconds of a request, as in worker.py.

        Raises:
            WorkerError: the request failed, or the process ended.
        """
        with suppress(BrokenPipeError):  # _reply raises with the reason
            self._connection.send(dict(request))
        seconds: float = self._reply()["seconds"]
        return seconds

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _reply(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            lines = self._log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise WorkerError(f"ended {how}: {_shortened(last)}") from None
        if "error" in reply:
            raise WorkerError(_shortened(reply["error"]))
        return reply


def _shortened(reason: str) -> str:
    """One line of bounded length."""
    return " ".join(reason.split())[:_REASON_CHARS]
