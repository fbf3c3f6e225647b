"""The engines under comparison: environment, options and worker file of each.

Peers have environments of their own, which the Makefile creates: .vllm and those in .peers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.workers.process import WorkerProcess
from generator_service import embedded

VLLM, PEERS = Path(".vllm"), Path(".peers")
LLAMACPP = PEERS / "llamacpp"
_BUILD = Path("build/peers").absolute()
# Rows of a step in vLLM at least; with more candidates all are in one step, as in ours.
_VLLM_ROWS = 256
# A machine with CUDA has vLLM in this environment.
_VLLM_IS_HERE = importlib.util.find_spec("vllm") is not None
_VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(_BUILD / "vllm"),
    "TORCHINDUCTOR_CACHE_DIR": str(_BUILD / "inductor"),
}
_VLLM_CPU_ENVIRONMENT = _VLLM_ENVIRONMENT | {
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


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine; `settings` describes it in the report."""

    name: str
    settings: str
    options: Mapping[str, Any]
    home: Path | None = None  # of its virtual environment; None: this one
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: str = ""  # another one than `name`

    def behind_verbs(self, model: Path, slots: int, most: int) -> EngineSpec:
        """The same engine as a generator with at most `most` candidates: generator_worker.py."""
        return replace(
            self,
            name=f"{self.name}-verbs",
            options={
                "model": str(model),
                "engine": "vllm" if self.name == "vllm" else "own",
                "device": "cpu",
                "kv_slots": slots,
                "max_candidates": most,
            },
            environment={
                **self.environment,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                # The environments have different versions of numba.
                "NUMBA_CACHE_DIR": str(_BUILD / f"numba-{self.name}"),
            },
            worker="generator",
        )

    def start(self, threads: int) -> WorkerProcess:
        """Start its process, which is not ready yet.

        Raises:
            WorkerError: its environment does not exist.
        """
        return WorkerProcess(
            self.home / "bin" / "python" if self.home else Path(sys.executable),
            Path(__file__).with_name(f"{self.worker or self.name}_worker.py"),
            {**self.options, "threads": threads},
            {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.environment},
            _BUILD / "logs" / f"{self.name}.log",
        )


def all_engines(model: Path, slots: int, context_tokens: int, most: int) -> list[EngineSpec]:
    """Ours first. `slots` and `context_tokens` are those of the largest request, which has `most`
    candidates."""
    return [
        EngineSpec(
            "specrej",
            "float32",
            {"model": str(model), "slots": slots},
            environment={"PYTHONPATH": str(Path(__file__).parents[2])},
        ),
        EngineSpec("transformers", "float32, generate()", {"model": str(model)}),
        EngineSpec(
            "vllm",
            "float32, compiled, prefix caching in blocks of 32 tokens",
            {
                "model": str(model),
                "context_tokens": context_tokens,
                "vllm_options": {"max_num_seqs": max(_VLLM_ROWS, most)},
            },
            None if _VLLM_IS_HERE else VLLM,
            _VLLM_ENVIRONMENT if _VLLM_IS_HERE else _VLLM_CPU_ENVIRONMENT,
        ),
        EngineSpec(
            "llamacpp",
            "4-bit weights below N=8, the same unpacked to float32 from there; float16 KV",
            {
                "packed": str(embedded.package_directory() / embedded.WEIGHTS),
                "unpacked": str(LLAMACPP / "SmolLM2-135M-Instruct.F32.gguf"),
            },
            LLAMACPP,
        ),
    ]


def vllm_pooling(model: Path, context_tokens: int) -> EngineSpec:
    """vLLM as a server of a sequence classifier."""
    return EngineSpec(
        "vllm_pooling",
        "float32, compiled, pooling runner",
        {"model": str(model), "context_tokens": context_tokens},
        VLLM,
        _VLLM_CPU_ENVIRONMENT,
    )


def answering_engines(model: Path, port: int, context_tokens: int, most: int) -> list[EngineSpec]:
    """Those that answer prompts with at most `most` candidates.

    The first is vLLM's server at `port`, which two others call.
    """
    served = {
        "model": str(model),
        "port": port,
        "context_tokens": context_tokens,
        "max_num_seqs": max(_VLLM_ROWS, most),
    }
    client = {"url": f"http://127.0.0.1:{port}/v1"}
    direct = {"NO_PROXY": "127.0.0.1"}
    environment = {**_VLLM_CPU_ENVIRONMENT, **direct}
    own_rating = "vLLM's server, own ratings choose"
    return [
        EngineSpec("vllm", "server, n = N", served, VLLM, environment, worker="vllm_server"),
        EngineSpec("its_hub", "vLLM's server", client, PEERS / "its_hub", direct),
        EngineSpec("optillm", own_rating, client, PEERS / "optillm", direct),
        # As in our services: idle threads of the default spin, 30 times as long on a busy machine.
        EngineSpec(
            "transformers",
            "generate()",
            {"model": str(model)},
            environment={"GOMP_SPINCOUNT": "1000"},
        ),
    ]
