"""Processes of vLLM, which must not outlive the service that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.serving import until

_SERVICE = """
import multiprocessing, time
from specrej_models.vllm_options import end_children_with_us

end_children_with_us()
end_children_with_us()  # as each reward on vLLM does
process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
process.start()
print(process.pid, flush=True)
process.join()
"""


async def test_an_engine_process_ends_with_a_service_that_is_killed() -> None:
    """Guards the memory of a GPU: vLLM itself ends it only with a service that ends in order.

    tests/reward_service/test_vllm_classifier.py does the same with vLLM's own process.
    """
    with subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE) as service:  # noqa: ASYNC220
        assert service.stdout
        engine = int(service.stdout.readline())
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
