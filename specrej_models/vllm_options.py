"""What both model services set for vLLM and its processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess

# Tokens of vLLM's blocks: its default, on CPUs the fewest with which its kernels are fast.
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}


def prepare_environment(threads: int, **more: str) -> None:
    """Set what vLLM reads from variables only; variables that are set already win."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the service configures logging
        # On a CPU, one worker lives in the scheduler's process, which would spin on a core of its
        # own while it waits for another process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # This version cannot load the compiled code that it stores.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
        **more,
    }
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def end_with_parent() -> None:
    """End this process with the one that started it; no effect outside of multiprocessing.

    vLLM's engine process outlives a service that is killed, and would keep its share of a GPU.
    """
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
