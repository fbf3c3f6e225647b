"""Draws a real demo run as an SVG: `python -m benchmarks.picture docs/demo.svg`."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from specrej import demo


def main() -> None:
    """Run the demo on a recording console."""
    # As wide as a README shows it; what is drawn live goes nowhere but into the recording.
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=False)
    asyncio.run(demo.run(demo.PROMPT, console))
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(sys.argv[1], title="make demo")


if __name__ == "__main__":
    main()
