"""Options of the load test, added to Locust's command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError

from loadtest.prompts import OWN_PROMPTS
from specrej.contracts import Algorithm

BOTH = "both"


def counts(text: str) -> tuple[int, ...]:
    """Candidates per request: "16" or "1,4,16".

    Raises:
        ArgumentTypeError: the text is not a list of numbers from 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError("must be candidates per request, such as 16 or 1,4,16")
    return tuple(int(part) for part in parts)


def add_options(parser: ArgumentParser) -> None:
    """Listener of Locust's `init_command_line_parser`."""
    _add_request_options(parser)
    _add_load_options(parser)
    _add_limits(parser)


def _checked_counts(text: str) -> str:
    # The value stays text: Locust sends it to workers and shows it in the browser.
    counts(text)
    return text


def _add_request_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--n",
        type=_checked_counts,
        default="16",
        help="candidates per request; several, such as 1,4,16, are used for --step-seconds each",
    )
    parser.add_argument("--step-seconds", type=float, default=30, help="duration of each --n")
    parser.add_argument(
        "--algorithm",
        choices=[*(algorithm.value for algorithm in Algorithm), BOTH],
        default=Algorithm.SPECULATIVE_REJECTION.value,
        help="both: send each request twice, with the same prompt and seed",
    )
    parser.add_argument("--alpha", type=float, default=0.5, help="fraction rejected per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="most new tokens per candidate")
    parser.add_argument(
        "--cache",
        choices=["bypass", "on"],
        default="bypass",
        help="bypass: generate every answer; on: repeat prompts, so that the cache answers them",
    )
    parser.add_argument("--prompts", default=str(OWN_PROMPTS), help="file with one prompt per line")
    parser.add_argument("--request-timeout", type=float, default=120, help="deadline in seconds")


def _add_load_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=["constant", "ramp", "spike", "steps"],
        default="constant",
        help="number of users over --run-time: all; rising evenly to all; a tenth, all, a tenth. "
        "steps: all, until every --n was used",
    )
    parser.add_argument(
        "--rate", type=float, default=0.5, help="open loop: arrivals per second of each user"
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=1000,
        help="open loop: most unanswered requests per user; further requests are missed",
    )


def _add_limits(parser: ArgumentParser) -> None:
    limits = parser.add_argument_group("limits", "the exit code is 1 if a limit is broken")
    limits.add_argument("--max-p95-ms", type=float, help="latency of whole answers")
    limits.add_argument("--max-first-round-p95-ms", type=float, help="time to the first round")
    limits.add_argument("--max-failure-ratio", type=float, help="of calls; default: 0")
    limits.add_argument("--max-late-ratio", type=float, help="open loop: sent late, or missed")
    limits.add_argument("--min-goodput", type=float, help="answers within --slo-ms, per second")
    limits.add_argument("--slo-ms", type=float, default=10_000, help="limit of a good answer")
