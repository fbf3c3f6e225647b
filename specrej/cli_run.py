"""How every command ends: what is printed where, and its exit code."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

import typer

from specrej import errors
from specrej.processes import ProcessError

_EXIT_CODES: dict[type[errors.SpecrejError], int] = {
    errors.InvalidRequest: 2,
    errors.NotFound: 2,
    errors.Unavailable: 3,
    errors.DeadlineExceeded: 4,
    errors.Overloaded: 5,
    errors.Unauthenticated: 6,
    errors.PermissionDenied: 6,
}
_INTERRUPTED = 130
_TERMINATED = 143


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end; errors and signals become one line on stderr and an exit code."""
    try:
        asyncio.run(_with_sigterm(work))
    except errors.SpecrejError as error:
        note(f"specrej: {' '.join(error.message.split()) or error.reason}")
        raise typer.Exit(_EXIT_CODES.get(type(error), 1)) from None
    except ProcessError as error:
        note(f"specrej: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(_TERMINATED) from None


async def _with_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM unwinds like Ctrl-C does, so that whatever was started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def note(text: str) -> None:
    """To people, not to what reads the output."""
    typer.echo(text, err=True)


def print_json(plain: Mapping[str, object]) -> None:
    """One object, for people and scripts."""
    typer.echo(json.dumps(plain, ensure_ascii=False, indent=2))
