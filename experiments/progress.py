"""How far a collection is and how long it will take: a bar for people, lines for logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.collect import Watcher
from experiments.prompts import Item
from experiments.trajectories import Trajectories


@contextmanager
def shown(num_prompts: int, tokens_per_prompt: int) -> Iterator[Watcher]:
    """Shows progress, on stderr, of so many prompts of so many candidate-tokens."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:5.1f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{num_prompts} prompts", total=num_prompts, left="?")
        began, num_done, settled = time.perf_counter(), 0, 0.0

        def left_text() -> str:
            if not settled:
                return "?"
            # Not of the last minutes only: prompts differ in how long their answers are.
            seconds = (time.perf_counter() - began) * (num_prompts - settled) / settled
            return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"

        def advance(tokens: int) -> None:
            nonlocal settled
            settled += tokens / tokens_per_prompt
            bar.update(task, completed=settled, left=left_text())

        def done(item: Item, trajectories: Trajectories, seconds: float) -> None:
            nonlocal num_done
            num_done += 1
            console.print(
                f"[{num_done}/{num_prompts}] {item.id}: {trajectories.n} answers, "
                f"{int(trajectories.num_tokens.sum()):,} tokens, "
                f"{trajectories.finished.mean():.0%} complete, {seconds:.0f} s; {left_text()} left",
                highlight=False,
                markup=False,
            )

        yield Watcher(advance, done)
