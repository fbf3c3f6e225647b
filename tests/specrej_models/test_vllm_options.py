"""Processes of vLLM, which must not outlive the service that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.serving import until

_SERVICE = """
import multiprocessing, sys, time
{start}
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(600)
"""
_START = """
from specrej_models.vllm_options import end_children_with_us
end_children_with_us()
end_children_with_us()  # as each reward on vLLM does
multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
"""


async def test_an_engine_process_ends_with_a_service_that_is_killed() -> None:
    """Guards the memory of a GPU: vLLM itself ends it only with a service that ends in order."""
    await end_with_service(_START)


async def end_with_service(start: str, *arguments: str) -> None:
    """Return once the child that the program `start` starts has ended with a killed service."""
    command = [sys.executable, "-c", _SERVICE.format(start=start), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as service:  # noqa: ASYNC220
        assert service.stdout
        engine = int(next(line for line in service.stdout if line.strip().isdigit()))
        service.send_signal(signal.SIGKILL)

    def has_ended() -> bool:
        try:
            os.kill(engine, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{engine}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] == "Z"

    try:
        await until(has_ended)
    finally:
        if not has_ended():
            os.kill(engine, signal.SIGKILL)
