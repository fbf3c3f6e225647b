"""What the report says: what each figure shows, and what came out. Returns HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from loadtest.sweep.plan import Condition
from loadtest.sweep.results import FAST, FULL, Comparison, Results

# The pair that is claimed, where both were measured; the largest pair there is otherwise.
_CLAIMED_N, _CLAIMED_BEST_OF_N = 128, 64


def introduction(results: Results) -> list[str]:
    """What the two algorithms are."""
    return [
        "<b>Best-of-N</b> writes N answers to a prompt to the end and returns the one that a "
        "reward model likes best. More candidates give a better answer, and cost more. "
        "<b>Speculative Rejection</b> also starts N answers, but scores them while they are being "
        "written, at <i>decision tokens</i>, and stops the worse ones there "
        f"({results.settings.alpha:.0%} each time). Both ran on the same engine, "
        "with the same prompts and seeds.",
    ]


def claim(results: Results) -> str:
    """The one sentence to take away, with its figures, whatever they say."""
    found = claimed(results)
    if found is None:
        return "No pair of N was measured that would tell the two algorithms apart."
    ours = results.cell(Condition.ALONE, FAST, found.n)
    theirs = results.cell(Condition.ALONE, FULL, found.best_of_n)
    assert ours is not None
    assert theirs is not None
    says = {
        "below": "is <b>below</b> that of",
        "above": "is <b>not below</b>, but above, that of",
        "not told apart": "could <b>not be told apart</b> from that of",
    }[found.verdict]
    return (
        f"The latency of Speculative Rejection at N = {found.n} {says} Best-of-N at "
        f"N = {found.best_of_n}: a median of {_s(ours.p50.value)} against {_s(theirs.p50.value)} "
        f"with one request at a time, {_ratio(found)}. Reward: {ours.reward.value:.3f} against "
        f"{theirs.reward.value:.3f} on average, over {ours.num_requests} and "
        f"{theirs.num_requests} requests."
    )


def claimed(results: Results) -> Comparison | None:
    """Twice the candidates against as many, one request at a time."""
    doubled = [
        each
        for each in results.comparisons
        if each.condition == Condition.ALONE.value and each.n == 2 * each.best_of_n
    ]
    for each in doubled:
        if (each.n, each.best_of_n) == (_CLAIMED_N, _CLAIMED_BEST_OF_N):
            return each
    return max(doubled, key=lambda each: each.n, default=None)


def latency(results: Results) -> list[str]:
    """On the three pictures of latency."""
    settings = results.settings
    return [
        "Seconds from sending a request to having the whole answer. Solid lines are the median "
        "(half of the requests were faster), dashed ones p95 (one in twenty was slower); shaded is "
        "where they would lie in 95 % of such measurements. Both axes are logarithmic: a line that "
        "rises by a step for a step to the right doubles with N.",
        "<b>One request at a time</b> is what an answer costs by itself. <b>At a fixed rate</b>, "
        f"{settings.rate:g} requests per second arrive as they please (Poisson), whether or not "
        "earlier ones are answered, and time counts from when a request was due; an arrow at the "
        f"top means that its user gave up, after {settings.patience_s:g} s. <b>At saturation</b>, "
        "several users ask again as soon as they are answered, enough to keep the service busy.",
    ]


def comparison(results: Results) -> list[str]:
    """On the table of ratios."""
    wins = [
        f"N = {each.n} against {each.best_of_n}"
        for each in results.comparisons
        if each.condition == Condition.ALONE.value
        and each.n == 2 * each.best_of_n
        and each.verdict == "below"
    ]
    said = f"It did at {_listed(wins)}." if wins else "It did at none of those measured."
    return [
        "If rejecting early saves enough, Speculative Rejection can begin with twice as many "
        f"candidates, and still answer sooner. {said} A ratio below 1 is in favour of Speculative "
        "Rejection; the verdict says whether all of its 95 % interval is on one side of 1.",
    ]


def reward(results: Results) -> list[str]:
    """On reward against N, and against latency."""
    name = html.escape(str(results.head.get("service", {}).get("reward", "the default reward")))
    return [
        f"The reward (<i>{name}</i>; more is better) of the returned answer, on average over the "
        "same prompts at every N. More candidates give it more to choose from, so both lines "
        "should rise; where Speculative Rejection lies lower, it has stopped a candidate that "
        "would have won. An answer that came to its end goes before one that was cut off, "
        "whatever their rewards.",
        "Reward against latency puts the price on the axis: each point is an N, written beside it. "
        "Of two lines, the one further up and to the left gives better answers for the same wait.",
    ]


def saving(results: Results) -> list[str]:
    """On tokens, first rounds and slots."""
    parts = [
        "Tokens are what a request makes the model write, over all candidates. The first round is "
        "the first moment at which anything is known: Speculative Rejection's ends at its first "
        "decision token, Best-of-N's only when all is written."
    ]
    if results.examples:
        parts.append(
            "A <i>slot</i> holds one token's keys and values in the model's memory. Slots fill up "
            "while candidates grow, and fall where a round ends and the rejected ones are freed: a "
            "saw-tooth. Both lines are one real request, the same prompt and seed. Slots are "
            "reported at the ends of rounds and drawn straight in between; the last rise is drawn "
            "as if all that were left grew to its end. Best-of-N, which has no rounds, was watched "
            "by rounds that rejected nobody."
        )
    return parts


def load(results: Results) -> list[str]:
    """On goodput."""
    return [
        f"An answer is <i>good</i> if it comes within {results.settings.slo_s:g} s. Goodput at "
        "saturation is how many of these there are per second, with users enough to keep the "
        "service busy; their number for every N is in the table. At a fixed rate, it is the share "
        "of all requests that are answered in time: it falls where N asks for more than there is.",
    ]


def method(results: Results) -> list[str]:
    """How figures came about, and how far they can be trusted."""
    settings = results.settings
    late = sum(cell.late for cell in results.cells)
    return [
        f"{results.num_requests} requests in {results.num_blocks} blocks, {settings.repeats} "
        "repeats. A block is a few requests of one algorithm and one N in one condition; the two "
        "algorithms' blocks follow each other at once, in turns, and the rest is shuffled in each "
        "repeat, so that drifts of the machine spread over all. How many requests a block has was "
        f"decided beforehand, by what a request was measured to cost, so that all fit "
        f"{settings.minutes:g} minutes; the tables have the counts. Prompts take turns; the cache "
        "is bypassed.",
        "Intervals are 95 % percentile bootstraps over requests (1,000 draws); fewer than four "
        "requests have none. Ratios of latencies are over the requests that both sides were asked, "
        "with the same prompts and seeds, and these are drawn in pairs. Percentiles of few "
        "requests are little more than their largest: below 20 requests p95 lies next to it, and "
        "p99 always does. An unanswered request counts as longer than anything, and &ldquo;never"
        "&rdquo; in a table means that such a one decides the figure.",
        f"{late} requests were sent more than 50 ms after they were due. The client is a process "
        "of its own on "
        + ("the same machine." if not settings.address else "the machine named below."),
    ]


def facts(results: Results) -> list[tuple[str, str]]:
    """Machine, model and settings."""
    settings, head = results.settings, results.head
    shown = {
        "date": head.get("date", ""),
        "service": settings.address or "started by the sweep, all processes on one machine",
        **head.get("service", {}),
        **head.get("machine", {}),
        "N": ", ".join(map(str, settings.ns)),
        "new tokens": f"{settings.max_tokens} at most",
        "prompts": " / ".join(settings.prompts),
        "alpha": settings.alpha,
        "seed": settings.seed,
        "made by": head.get("command", ""),
    }
    return [(name, str(value)) for name, value in shown.items() if value != ""]


def _ratio(found: Comparison) -> str:
    value = found.latency
    if math.isnan(value.value):
        return "without a ratio"
    if math.isnan(value.low):
        return f"{value.value:.2f} times as long, of too few requests to be sure"
    return f"{value.value:.2f} times as long (95 % of draws: {value.low:.2f} to {value.high:.2f})"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if math.isfinite(seconds) else "no answer"


def _listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
