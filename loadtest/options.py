"""What Locust's command line takes besides its own options."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError

from loadtest.prompts import OWN_PROMPTS
from specrej.contracts import Algorithm

BOTH = "both"


def add_options(parser: ArgumentParser) -> None:
    """To Locust's own parser."""
    _add_request_options(parser)
    _add_load_options(parser)
    _add_thresholds(parser)


def counts(text: str) -> tuple[int, ...]:
    """Candidates, "16" or "1,4,16".

    Raises:
        ArgumentTypeError: it is not a list of numbers from 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError("wants candidates per request, such as 16 or 1,4,16")
    return tuple(int(part) for part in parts)


def _checked_counts(text: str) -> str:
    # Stays text: it travels to workers and shows in the browser.
    counts(text)
    return text


def _add_request_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--n",
        type=_checked_counts,
        default="16",
        help="candidates per request; several, such as 1,4,16, take turns of --step-seconds each",
    )
    parser.add_argument("--step-seconds", type=float, default=30, help="how long each of --n lasts")
    parser.add_argument(
        "--algorithm",
        choices=[*(each.value for each in Algorithm), BOTH],
        default=Algorithm.SPECULATIVE_REJECTION.value,
        help="both: each question is asked twice, with the same seed",
    )
    parser.add_argument("--alpha", type=float, default=0.5, help="fraction rejected per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="most new tokens per candidate")
    parser.add_argument(
        "--cache",
        choices=["bypass", "on"],
        default="bypass",
        help="bypass: every request is generated; on: prompts come back, and are answered from it",
    )
    parser.add_argument("--prompts", default=str(OWN_PROMPTS), help="file with one prompt per line")
    parser.add_argument("--request-timeout", type=float, default=120, help="deadline in seconds")


def _add_load_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=["constant", "ramp", "spike", "steps"],
        default="constant",
        help="of the users over --run-time: all at once; one more and more; a tenth, all, a tenth. "
        "steps: all, until every one of --n had its turn",
    )
    parser.add_argument(
        "--rate", type=float, default=0.5, help="open loop: arrivals per second, of each user"
    )
    parser.add_argument(
        "--max-in-flight", type=int, default=1000, help="open loop: per user; more are missed"
    )


def _add_thresholds(parser: ArgumentParser) -> None:
    limits = parser.add_argument_group("limits", "the exit code is 1 if one of them is not kept")
    limits.add_argument("--max-p95-ms", type=float, help="of whole answers")
    limits.add_argument("--max-first-round-p95-ms", type=float, help="until the first round's end")
    limits.add_argument("--max-failure-ratio", type=float, help="of calls; none may fail otherwise")
    limits.add_argument("--max-late-ratio", type=float, help="open loop: sent late, or missed")
    limits.add_argument("--min-goodput", type=float, help="answers within --slo-ms, per second")
    limits.add_argument("--slo-ms", type=float, default=10_000, help="what a good answer may take")
