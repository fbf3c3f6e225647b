"""The reward that runs unit tests: scores, and the limits of its child processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from examples.coding.coding import HERE
from examples.coding.unit_tests import UNTESTED, asserts_of, code_of, num_passed
from specrej import Prompt
from specrej.client import RewardClient
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TASK = Prompt.from_user((HERE / "task.md").read_text())
TESTS = asserts_of(TASK)
RIGHT = "```python\ndef largest(numbers):\n    return max(numbers, default=None)\n```\nIt uses max."
HALF = "```\ndef largest(numbers):\n    return numbers[0]\n```"
WRONG = "```python\ndef largest(numbers):\n    return 0\n```"


async def test_the_score_is_the_share_of_passed_tests(toys: Stack) -> None:
    """By the reward service, which imports the function by its name."""
    unfinished = RIGHT.rpartition("```")[0]
    async with RewardClient(toys.reward_address) as rewards:
        scores = await rewards.score(
            TASK, [RIGHT, HALF, WRONG, unfinished, "No."], reward="unit-tests"
        )
    assert scores.values == pytest.approx((1, 0.25, 0, UNTESTED, UNTESTED))
    assert code_of(RIGHT) and code_of(unfinished) is None


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        "import sys; sys.stdout.write('....'); print('....')",
        "this is no Python",
        "a null character \0",
        "x = bytearray(1 << 30)",
        "def largest(numbers): return x",
    ],
)
async def test_code_that_fails_passes_nothing(code: str) -> None:
    """Guards the report: text on stdout is no passed test."""
    assert num_passed(code, TESTS) == 0


async def test_children_of_the_code_end_with_it(tmp_path: Path) -> None:
    """Only root's code can start any: for others there is a limit."""
    pid = tmp_path / "pid"
    code = f"""
import os, time
if not os.fork():
    os.closerange(0, 32)
    with open("{pid}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("{pid}.new", "{pid}")
    time.sleep(90)
while not os.path.exists("{pid}"):
    time.sleep(0.01)
"""
    assert num_passed(code, ("assert True",)) == pid.exists()
    if pid.exists():
        await until(lambda: not Path("/proc", pid.read_text()).exists(), bound_s=30)


async def test_the_code_sees_an_empty_folder_and_no_environment() -> None:
    tests = (
        "import os; assert os.listdir('.') == []",
        "assert 'HOME' not in os.environ",
        "open('file', 'wb', 0).write(bytes(2 << 20)); assert os.path.getsize('file') == 1 << 20",
    )
    assert num_passed("", tests) == len(tests)


def has_namespaces() -> bool:
    ours = Path("/proc/self/ns/net").readlink()
    return num_passed("", (f"import os; assert os.readlink('/proc/self/ns/net') != '{ours}'",)) == 1


async def test_the_code_has_no_network_where_namespaces_exist() -> None:
    if not has_namespaces():
        pytest.skip("the kernel refuses new namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert num_passed("", (connect,)) == 0
