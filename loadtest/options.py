"""Options of the load test, added to Locust's command line and to the form of its page."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
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


def _prompts(path: str) -> str:
    # The value stays text: Locust sends it to workers and shows it in the browser.
    try:
        read_prompts(Path(path))
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from None
    return path


def add_options(parser: ArgumentParser) -> None:
    """Listener of Locust's `init_command_line_parser`."""
    parser.add_argument("--n", type=int, default=16, help="candidates per request")
    parser.add_argument(
        "--algorithm",
        choices=[*(algorithm.value for algorithm in Algorithm), BOTH],
        default=Algorithm.SPECULATIVE_REJECTION.value,
        help="both: send each request twice, with the same prompt and seed",
    )
    parser.add_argument("--alpha", type=float, default=0.5, help="fraction rejected per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="most new tokens per candidate")
    parser.add_argument(
        "--prompts", type=_prompts, default=str(OWN_PROMPTS), help="file with one prompt per line"
    )
    parser.add_argument("--request-timeout", type=float, default=120.0, help="deadline in seconds")
