"""A worker file with a toy engine, for tests of worker processes."""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks import worker


class Toy:
    """Loads, works and ends as `mode` and the request say."""

    def __init__(self, mode: str) -> None:
        print("printed while loading")
        os.system("echo printed by a child")
        if mode == "slow":
            time.sleep(600)
        self.versions = {"toy": "1.0"}

    def measure(self, n: int) -> float:
        print("printed while working")
        if n == 0:
            raise ValueError("nothing\nto do")
        if n < 0:
            print("last line", file=sys.stderr, flush=True)
            os._exit(3)
        return float(n)


if __name__ == "__main__":
    vars(worker)["Toy"] = Toy
    worker.main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
