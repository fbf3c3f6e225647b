"""What the report says: what each study asks, and what came out. Returns HTML."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

import numpy as np

from experiments.report.summary import setting
from experiments.studies.analysis import Analysis
from experiments.studies.matched import EXPECTED, Match, expected_saving
from experiments.studies.statistics import Estimate
from experiments.studies.tables import shown

_LENGTHS = (128, 512, 1024, 2048)
_SETTLED = 0.99  # tau of partial and final rewards, from which on a reward no longer changes


def introduction() -> list[str]:
    """The two algorithms."""
    return [
        "A language model that answers a prompt many times gives good answers and bad ones. "
        "<b>Best-of-N</b> writes N answers to their ends, lets a <i>reward</i> judge them, and "
        "returns the best. It works, and costs N times as much. <b>Speculative Rejection</b> "
        "(Sun et al., NeurIPS 2024) starts N answers too, but judges them while they are being "
        "written, at <i>decision tokens</i>, and stops the lowest part of them there, called "
        "<i>alpha</i>. What is stopped need not be finished, so most of the work is saved. It "
        "loses only if the answer that would have been best looked bad early.",
        "This page measures both on <b>one engine</b>: the same model, prompts, seeds and answers. "
        "All answers were written to their ends once and judged at many lengths; then every "
        "setting was replayed on them, which gives what a live run would have given.",
    ]


def claim(analyses: Sequence[Analysis]) -> str:
    """What the list of ratios is of."""
    usual = analyses[0].matched.default
    return (
        "For an answer of the same reward, Best-of-N writes so many times the tokens that "
        f"Speculative Rejection writes with the service's default (alpha {usual.alpha:g}, cuts at "
        f"{_written(usual.schedule)}):"
    )


def claims(analyses: Sequence[Analysis]) -> list[str]:
    """The ratio at equal reward, for each collection and reward, whatever it says."""
    return [_claim(each) for each in analyses]


def _claim(analysis: Analysis) -> str:
    matched = analysis.matched
    usual, best = matched.default, matched.best
    text = f"{of(analysis)}, N = {usual.n}: <b>{times(usual.ratio)}</b>."
    if best == usual:
        return text
    text += (
        f" The best of {analysis.facts.num_plans} settings ({html.escape(setting(best))}): "
        f"{times(best.ratio)}"
    )
    if not math.isfinite(matched.crossed):
        return text + "."
    return (
        text + f"; chosen on one half of the prompts, {shown(matched.crossed)} times on the other."
    )


def reasons() -> list[str]:
    """Why the ratio is what it is."""
    bounds = ", ".join(f"{_doubling(length):.3g} at {length:,}" for length in _LENGTHS)
    return [
        "The ratio is a product. The first factor is what is saved when both start with the same "
        "N. It cannot be large for short answers, because every one of the N is written to the "
        "first decision token at least. With cuts at 16, 32, 64, ... tokens, half rejected each "
        "time, an answer costs 16 (1 + log<sub>2</sub>(T / 16) / 2) tokens instead of T if all are "
        f"so long: a bound of {bounds} tokens. The paper's 16 to 32 times lie at the long end, and "
        "its two algorithms ran on different engines. The second factor is the part of N that is "
        "left once the best answer is sometimes rejected: 1 if it never was, and smaller the less "
        "the beginning of an answer tells of its end.",
    ]


def reason(analysis: Analysis) -> str:
    """The same for one collection and reward."""
    match, facts = analysis.matched.default, analysis.facts
    return (
        f"<b>{of(analysis)}.</b> {facts.complete_share:.0%} of the answers end before the limit of "
        f"{facts.max_tokens:,} tokens; they are {facts.mean_tokens:,.0f} tokens long on average. "
        f"Of such lengths, rejection that ignores length saves {shown(match.expected)} times, one "
        "that favours shorter answers more (if all went on to the limit, the bound would be "
        f"{shown(match.bound_full)}). Measured: {shown(match.saving)} at equal N, and "
        f"{_kept(match)}.{_settled(analysis)}"
    )


def _settled(analysis: Analysis) -> str:
    """From where on the rewards of answers no longer change, if there is such a place."""
    found = itertools.takewhile(
        lambda each: each.kendall.value >= _SETTLED, reversed(analysis.correlation.decision_tokens)
    )
    positions = [each.position for each in found]
    if not positions:
        return ""
    return (
        f" Scores are settled by token {positions[-1]:,} (from there, tau with the final ones is "
        f"at least {_SETTLED:g}): what follows costs tokens and hardly changes them, so the longer "
        "answers are, the cheaper it is to reject them, by construction."
    )


def _kept(match: Match) -> str:
    if not math.isfinite(match.matched_n.value):
        return "a reward beyond that of every Best-of-N that was measured"
    if match.kept > 0.999:
        return "no reward lost, so that all of it counts"
    return (
        f"a reward as good as Best-of-N's with N = {_estimate(match.matched_n)}, "
        f"{match.kept:.0%} of {match.n}"
    )


def matched() -> list[str]:
    """On the charts of ratios."""
    return [
        "For every setting: its mean reward, the N that Best-of-N needs for as much (read from its "
        "curve, between the measured N on a line over log N), and the ratio of the tokens of the "
        f"two. Thin vertical lines are 95 % intervals; dotted is what is {EXPECTED}: the saving "
        "at equal N of answers as long as these if who stays were drawn by lot. It is no bound: "
        "where a reward favours shorter answers, those that would have become long are rejected "
        "first, and more is saved. Up to some alpha, a ratio follows its dotted line; beyond, "
        "good answers are rejected, and it falls.",
        "The memory schedule has no such line: its cuts come where memory is full, which depends "
        "on alpha and on who ends early.",
    ]


def lengths() -> list[str]:
    """On the table of lengths."""
    return [
        "An answer that ends by itself costs Best-of-N nothing more, so there is less to save. It "
        "matters twice: by how much less, and because a reward may prefer answers of some length: "
        "if short ones, rejection ends the long ones first. Each table has a row per prompt.",
    ]


def lengths_found(analysis: Analysis) -> str:
    """How long answers are, and the best of them."""
    found = analysis.lengths
    ended = [each.ended_share for each in found.prompts]
    best = sum(each.best_ended for each in found.prompts)
    tendency = (
        f" Length and reward correlate by {shown(found.tendency)}."
        if math.isfinite(found.tendency.value)
        else ""
    )
    return (
        f"Between {min(ended):.0%} and {max(ended):.0%} of a prompt's answers end before the limit "
        f"of {found.max_tokens:,} tokens, and Best-of-N's answer itself in {best} of "
        f"{len(found.prompts)} prompts. Answers have {found.mean_tokens:,.0f} tokens on average, "
        f"Best-of-N's {shown(found.best_tokens)}.{tendency}"
    )


def recommended() -> list[str]:
    """On the tables of recommended settings."""
    return [
        "Of all settings that were replayed at the whole limit: the cheapest that loses little, "
        "and the best within a budget. <i>Regret</i> is 0 for Best-of-N's answer with all "
        "candidates, and 1 for what one answer gives on average; <i>cost</i> is tokens in parts "
        "of that Best-of-N's, prompt by prompt, then averaged. The best of hundreds looks better "
        "than it is: the columns on prompts left out say what settings that were chosen on "
        "resampled prompts lose and cost on those that were not among them, and the last one how "
        "often the same setting would be chosen.",
    ]


def adaptive() -> list[str]:
    """On policies."""
    return [
        "The paper rejects the same share in every round, and asks whether one should. Two "
        "policies choose alpha by what is known at a decision token: how far scores are apart, "
        "and how well prefixes of that length foretold answers on other prompts. <i>risk</i> "
        "rejects as many as it can while the chance that the best is among them stays small; "
        "<i>price</i> rejects whoever's chance is not worth the tokens. Each has a knob: how "
        "small, how much. <i>Gain</i> is by how much less regret a policy has than fixed alphas "
        "(the best of them, or two by turns) with as many tokens; above 0 it is better. Of each "
        "policy and schedule the best knob is told. Intervals hold for all knobs of a table at "
        "once, as the best of many is partly luck.",
        "The comparison leans towards fixed alphas: which of them are best is read from the very "
        "prompts that they are measured on, while a policy has learnt from the other prompts "
        "alone. And few prompts give wide intervals: that no gain is shown does not say that "
        "there is none.",
    ]


def best_of_n() -> list[str]:
    """On the charts of Best-of-N."""
    return [
        "What more answers buy. The reward of the best of N, averaged over prompts and over all "
        "ways to draw N of the answers; each doubling of N doubles the cost. Shaded is the 95 % "
        "interval over prompts: prompts differ, so it is wide, and both algorithms share it."
    ]


def best_of_n_found(analysis: Analysis) -> str:
    """The last doubling against the first."""
    points = analysis.best_of_n.points
    if len(points) < 3:
        return ""
    first = points[1].gain.value - points[0].gain.value
    last = points[-1].gain.value - points[-2].gain.value
    return (
        f"The first doubling gains {shown(first)}, the last one, to N = {points[-1].n}, "
        f"{shown(last)}."
    )


def sweep() -> list[str]:
    """On the charts over alpha."""
    return [
        "<i>Regret</i> is what Speculative Rejection's answer is worth less than the best of all N "
        "that it started: 0 if it found the same. It is shown in parts of what N answers gain over "
        "one. The other chart is the reason to accept some: how many times fewer tokens were "
        "written than by Best-of-N of the same N. A schedule says where cuts are: <i>from 16, x2"
        "</i> is at 16, 32, 64, ... tokens; <i>at 16, 64</i> exactly there; <i>memory for 16 each"
        "</i> is the paper's: whenever memory for 16 tokens of all N is full.",
    ]


def sweep_found(analysis: Analysis) -> str:
    """Which alphas cost next to nothing."""
    usual = analysis.matched.default
    points = [
        point
        for point in analysis.sweep.points
        if (point.n, point.schedule) == (usual.n, usual.schedule)
    ]
    free = [point for point in points if point.regret_share <= 0.01]
    if not free:
        return f"Every alpha loses more than 1 % of the gain ({html.escape(usual.schedule)})."
    most = max(free, key=lambda point: point.alpha)
    return (
        f"{html.escape(usual.schedule.capitalize())}: up to alpha {most.alpha:g}, at most 1 % of "
        f"the gain is lost, for {shown(most.saving.value)} times fewer tokens."
    )


def correlation() -> list[str]:
    """On the clouds and lines."""
    return [
        "Early rejection rests on one thing: that the reward of an answer's beginning tells "
        "something of the reward of all of it. Each dot is an answer that goes on after that many "
        "tokens, its reward then (across) and in the end (up), both less its prompt's average. "
        "Pearson's r and Kendall's tau are 1 if they agree and 0 if they have nothing to do with "
        "each other. They are taken within each prompt and averaged. The last chart is what "
        "counts: whether the one answer that is best in the end would still be there after one "
        "cut; dotted is chance.",
    ]


def correlation_found(analysis: Analysis) -> str:
    """At the first and the last decision token."""
    tokens = analysis.correlation.decision_tokens
    if not tokens:
        return ""
    told = " ".join(
        f"At token {each.position}, tau is {each.kendall.value:.2f}, and the best answer survives "
        f"a cut of alpha {each.survivals[0].alpha:g} in {each.survivals[0].share.value:.0%} of "
        "prompts."
        for each in (tokens[0], tokens[-1])
    )
    return told if len(tokens) > 1 else told.split(". ")[0] + "."


def perplexity() -> list[str]:
    """On the paper's table."""
    return [
        "The reward may be the model's own: how probable it finds what it writes (the mean "
        "log-probability of a token). It costs nothing, and needs no reward model. <i>Perplexity"
        "</i> is e to the minus that: the number of equally likely tokens the model might as well "
        "have chosen from, so lower is more probable. This is the paper's test of probability "
        "maximisation: how probable an answer is found, and in how many times fewer tokens.",
    ]


def improvement(analysis: Analysis) -> list[str]:
    """On the score; the base is that of one analysis, all have the same rule."""
    base = analysis.improvement.base_n
    return [
        "The paper's own score. On every prompt, Best-of-N with a small N (here "
        f"{base}) sets the scale: its best answer is at 100, its worst at 0. 150 is better than "
        "its best by half of that range. Across is what it costs, in parts of that base's cost: a "
        "point to the left of Best-of-N's line, or above it, is a saving.",
        "Tokens count what was written. FLOPs also count reading the prompt, attention over "
        "growing answers and every call of the reward model; one that reads whole answers anew at "
        "each cut makes Speculative Rejection pay for its looking. Seconds are of live runs, "
        "where there are some. Their answers are the service's, complete ones first; so they are "
        "scored against Best-of-N's live answer to the same prompt, on the same scale.",
    ]


def improvement_found(analysis: Analysis) -> str:
    """Whose operations are counted."""
    model = analysis.improvement.model
    if not model:
        return "FLOPs are left out: the collection does not tell the sizes of its models."
    return f"FLOPs are those of {html.escape(model)}."


def anatomy() -> list[str]:
    """On one prompt."""
    return [
        "One prompt under the memory schedule, the paper's first figure. Every answer that grows "
        "holds <i>slots</i>, a token's keys and values each. Best-of-N needs room for all of them "
        "at once. With a small memory, Speculative Rejection runs into it, rejects the lower part, "
        "and goes on in the room that this frees: memory stays in use, the batch shrinks, and the "
        "rewards of those that stay rise.",
    ]


def anatomy_found(analysis: Analysis) -> str:
    """How much memory it takes."""
    found = analysis.anatomy
    if found is None:
        return "Prefixes were not scored early enough for this one."
    most = max(moment.full_slots for moment in found.moments)
    return (
        f"Prompt {html.escape(found.prompt_id)}: {len(found.rounds)} rounds in "
        f"{found.slots:,} slots, where Best-of-{found.n} holds {most:,} at once."
    )


def failures() -> list[str]:
    """On the three kinds."""
    return [
        "At the start of an answer the assumption can fail, in three ways that the paper names. "
        "<b>Similar scores</b>: if all answers score alike at the first cut, who is rejected is a "
        "matter of chance. Each dot is a prompt: across, how far apart its scores are at the first "
        "cut (in parts of the final spread); up, what the whole run lost, at later cuts too. "
        "<b>Early ends</b>: an answer may be over before the first cut. It cannot be rejected by "
        "mistake, but whole answers are then ranked among beginnings. <b>Misleading prefixes</b>: "
        "the answer that is best in the end ranks in the lower half, where a cut of alpha 0.5 "
        "rejects it.",
    ]


def failures_found(analysis: Analysis) -> str:
    """In one sentence each."""
    found = analysis.failures
    shares = dict(found.misled_share)
    first = next(each for each in found.early if each.position == found.first)
    together = (
        f"Spread and regret correlate by {shown(found.similar_pearson)}."
        if math.isfinite(found.similar_pearson.value)
        else "That is too few to tell whether similar scores are to blame."
    )
    return (
        f"At token {found.first}, {first.ended_share.value:.1%} of answers are over, the best one "
        f"in {first.best_share:.0%} of prompts; the best one is in the lower half in "
        f"{shares[found.first].value:.0%}. The run lost something in {found.num_lost} of "
        f"{len(found.similar)} prompts. {together}"
    )


def method() -> list[str]:
    """How far figures can be trusted."""
    return [
        "<b>Replays.</b> What a candidate writes depends on the seed, its number and the step, not "
        "on who else is there. So an answer that was written to its end contains every run that "
        "would have stopped it earlier, and a setting can be replayed without a model. Where full "
        "memory would cut between two lengths at which prefixes were judged, the cut is at the one "
        "before.",
        "<b>Best.</b> As in the paper, the best answer is the one with the highest reward among "
        "all that were written to their ends, be that their own or the limit. (The service itself "
        "prefers complete answers to stopped ones; where the limit stops nearly all, that would "
        "compare lengths, not rewards.) A reward measures what it measures: a higher one is not a "
        "promise of a better answer. And a reward that reads only so many tokens of an answer is "
        "settled by then: longer answers cost Best-of-N more without a chance to score otherwise, "
        "which makes them cheaper to reject by construction, not by how much beginnings tell. "
        "Where scores were found settled, the list at the top says from which token on.",
        "<b>Pairs.</b> Both algorithms are compared on the same answers. Where there are more "
        "answers than N, a setting is replayed on up to four groups of N.",
        "<b>Intervals</b> are 95 % bootstraps over prompts: prompts are drawn anew 1,000 times, "
        "each with all its answers, and everything is computed from those. Answers are not drawn "
        "anew within a prompt: a third of them would be missing from each draw, often the best "
        "one. Where the N that was looked for lies outside of those that were measured, in all or "
        "in some of the draws, the tables say so. Few prompts give wide intervals, and an interval "
        "without width says that no prompt of these differed, not that none could. A setting that "
        "was chosen for being best of many looks better than it is; the last column of the first "
        "table chooses on one half of the prompts and measures on the other.",
        "<b>FLOPs</b> are counted from lengths and from the sizes of the models that made the "
        "collection: two per weight and token, and attention's; a reward model reads every text it "
        "judges anew, as far as it reads. Where sizes are not known, they are left out.",
    ]


def times(estimate: Estimate) -> str:
    """A ratio and its interval."""
    if not math.isfinite(estimate.value):
        return "beyond what was measured"
    if math.isnan(estimate.low):
        return f"{estimate.value:.3g} times"
    return f"{estimate.value:.3g} times (95 %: {shown(estimate.low)} to {shown(estimate.high)})"


def _estimate(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return f"{estimate.value:.0f}"
    return f"{estimate.value:.0f} ({estimate.low:.0f} to {estimate.high:.0f})"


def of(analysis: Analysis) -> str:
    """A collection and a reward."""
    return f"{html.escape(analysis.collection)}, by {html.escape(analysis.reward)}"


def _written(schedule: str) -> str:
    """For those who have not met schedules yet."""
    return "16, 32, 64, ... tokens" if schedule == "from 16, x2" else html.escape(schedule)


def _doubling(max_tokens: int) -> float:
    """Of answers that are all so long."""
    tokens = [16 * 2**i for i in range(20) if 16 * 2**i < max_tokens]
    return expected_saving(np.full(1, max_tokens), 0.5, tokens)
