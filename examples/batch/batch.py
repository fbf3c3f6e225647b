"""Answer the prompts of a JSONL file; a run that was interrupted continues where it stopped.

Each input line is {"id": ..., "prompt": ...}. Each output line has the id and its answer, in the
order in which the answers are complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from specrej import Client, Generation, Retries, SpecrejError

Question = dict[str, Any]


async def run(options: argparse.Namespace) -> int:
    """Answer all questions that have no answer yet; returns the number of those that failed."""
    questions = read_questions(options.questions)
    finished = finished_ids(options.answers)
    work = (question for question in questions if question["id"] not in finished)
    num_failed = 0
    retries = Retries(8, max_wait_s=options.timeout)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        options.answers.open("a", encoding="utf-8") as answers,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("", total=len(questions), completed=len(finished))

        async def worker() -> None:
            nonlocal num_failed
            for question in work:  # shared by all workers
                try:
                    generation = await client.generate(
                        question["prompt"], n=options.n, temperature=0.7
                    )
                except SpecrejError as error:
                    num_failed += 1
                    progress.console.print(f"{question['id']}: {error}", markup=False)
                else:
                    answers.write(answer_line(question["id"], generation))
                    answers.flush()
                    progress.advance(bar)

        async with (
            Client(options.address, timeout_s=options.timeout, retries=retries) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(options.concurrency):
                group.create_task(worker())
    return num_failed


def answer_line(question_id: str, generation: Generation) -> str:
    best = generation.best
    answer = {"id": question_id, "text": best.text, "score": best.score}
    return json.dumps(answer, ensure_ascii=False) + "\n"


def read_questions(path: Path) -> list[Question]:
    """Raises ValueError: an id occurs twice, or a line is no JSON."""
    with path.open(encoding="utf-8") as lines:
        questions = [json.loads(line) for line in lines if line.strip()]
    if len({question["id"] for question in questions}) < len(questions):
        raise ValueError(f"{path}: an id occurs twice")
    return questions


def finished_ids(path: Path) -> set[str]:
    """The ids of the answers; cuts off a last line that an interruption left half-written."""
    with path.open("a+b") as file:
        file.seek(0)
        data = file.read()
        end = data.rfind(b"\n") + 1
        file.truncate(end)
    return {json.loads(line)["id"] for line in data[:end].splitlines()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds of each request, all attempts together",
    )
    options = parser.parse_args()
    if options.concurrency < 1:
        parser.error("--concurrency must be 1 or more")
    try:
        num_failed = asyncio.run(run(options))
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        return 130
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
