"""Shared by all benchmarks: arguments, cases, the table and the result line."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.local.machine import describe_machine


def parse_arguments(description: str | None, **options: tuple[Any, str]) -> argparse.Namespace:
    """Parse the command line.

    Each option has a default, which also decides its type, and a help text. A list takes several
    values, False is a flag. From then on SIGTERM ends this process as Ctrl-C does, so that it stops
    what it started.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    for name, (default, text) in options.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            kind = type(default[0])
            parser.add_argument(flag, type=kind, nargs="+", default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args()


def log(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def report(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    result: Mapping[str, Any],
    notes: Iterable[str] = (),
) -> None:
    """Print a table, notes and, as the last line, one JSON object with day and machine."""
    print_table(title, headings, rows)
    for note in notes:
        print(note)
    print(json.dumps({**result, **provenance()}))


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def provenance() -> dict[str, str | int]:
    """The day in UTC, and the machine: a part of every result."""
    return {"date": datetime.now(UTC).date().isoformat(), **describe_machine()}
