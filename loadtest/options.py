"""Options of the load test, added to Locust's command line and to the form of its page."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from specrej.contracts import Algorithm

BOTH = "both"
OWN_PROMPTS = Path(__file__).with_name("prompts.txt")


def read_prompts(path: Path = OWN_PROMPTS) -> tuple[str, ...]:
    """The file's lines without blank lines and lines that begin with "#".

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no prompt.
    """
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def counts(text: str) -> tuple[int, ...]:
    """Candidates per request: "16" or "1,4,16".

    Raises:
        ArgumentTypeError: the text is not a list of numbers from 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError("must be candidates per request, such as 16 or 1,4,16")
    return tuple(int(part) for part in parts)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    # The value stays text: Locust sends it to workers and shows it in the browser.
    def value(text: str) -> str:
        try:
            check(text)
        except (OSError, ValueError) as error:
            raise ArgumentTypeError(str(error)) from None
        return text

    return value


def add_options(parser: ArgumentParser) -> None:
    """Listener of Locust's `init_command_line_parser`."""
    parser.add_argument(
        "--n",
        type=_checked(counts),
        default="16",
        help="candidates per request; several, such as 1,4,16, are used for --step-seconds each",
    )
    parser.add_argument("--step-seconds", type=float, default=30.0, help="duration of each --n")
    parser.add_argument(
        "--algorithm",
        choices=[*(algorithm.value for algorithm in Algorithm), BOTH],
        default=Algorithm.SPECULATIVE_REJECTION.value,
        help="both: send each request twice, with the same prompt and seed",
    )
    parser.add_argument("--alpha", type=float, default=0.5, help="fraction rejected per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="most new tokens per candidate")
    parser.add_argument(
        "--prompts",
        type=_checked(lambda text: read_prompts(Path(text))),
        default=str(OWN_PROMPTS),
        help="file with one prompt per line",
    )
    parser.add_argument("--request-timeout", type=float, default=120.0, help="deadline in seconds")
