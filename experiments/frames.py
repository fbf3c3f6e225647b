"""Data frames of a collection under one reward: what the studies read.

Settings are replayed on every prompt. Where a prompt has more answers than N, up to four disjoint
groups of N are replayed and averaged. The answer is the one with the highest reward, complete or
not, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from experiments.replay import Setting, decision_tokens, replay
from experiments.statistics import expected_first
from experiments.trajectories import IntArray, Trajectories
from orchestrator.loop.composition import LIKELIHOOD
from specrej.client.options import parse_schedule
from specrej.contracts import Schedule, Selection

DEFAULT, DEFAULT_ALPHA = Selection().schedule, Selection().alpha  # the service's
ALPHAS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
SETTING = ["n", "alpha", "schedule"]  # columns that name a setting
_SCHEDULES = ("geometric:8,2", "geometric:16,2", "geometric:32,2", "geometric:64,2", "memory:16")
_MEMORY_TOKENS = 16  # with the memory schedule, slots for so many tokens of each candidate
_MIN_N = 16  # with fewer answers there is little to reject
_MAX_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Frames:
    """One collection under one reward.

    runs: a row per replayed setting (n, alpha, schedule) and prompt. tokens: generated;
        full_tokens: by Best-of-N with the same candidates; regret: the reward that Best-of-N's
        answer has more; reward: Best-of-N's mean over all draws less the regret, so that luck
        cancels at equal N.
    full: a row per prompt and n, 1 to N, with the means of Best-of-N over all draws of n answers:
        reward; worst, the lowest reward; tokens.
    prefixes: a row per prompt, decision token ("position") and answer: score, by which a cut there
        ranks (of the prefix; of the whole answer if it has ended); final score; live; best, whether
        it is the prompt's best answer in the end.
    """

    collection: str
    reward: str
    prompts: tuple[Trajectories, ...]
    runs: pd.DataFrame
    full: pd.DataFrame
    prefixes: pd.DataFrame

    @property
    def max_tokens(self) -> int:
        return max(prompt.max_tokens for prompt in self.prompts)

    @property
    def n(self) -> int:
        """Answers per prompt."""
        return min(prompt.n for prompt in self.prompts)

    @property
    def lengths(self) -> IntArray:
        """Tokens of all answers."""
        return np.concatenate([prompt.num_tokens for prompt in self.prompts])

    @property
    def default(self) -> pd.DataFrame:
        """The runs of the service's default with the largest N, or of the nearest setting."""
        usual = self.runs[(self.runs.n == self.runs.n.max()) & (self.runs.schedule == str(DEFAULT))]
        usual = self.runs if usual.empty else usual
        distance = (usual.alpha - DEFAULT_ALPHA).abs()
        first = usual[distance == distance.min()].iloc[0]
        return usual[(usual[SETTING] == first[SETTING]).all(axis=1)]

    def moved(self, schedule: Schedule) -> pd.DataFrame:
        """The default with another schedule; empty if it cuts where no prefix was scored."""
        n, alpha, _ = self.default.iloc[0][SETTING]
        if not _is_scored(self.prompts, self.reward, schedule):
            return self.runs.iloc[:0]
        setting = Setting(int(n), float(alpha), schedule, self.reward)
        return _with_rewards(replayed(self.prompts, [setting]), self.full)


def frames_of(
    collection: str,
    prompts: Sequence[Trajectories],
    reward: str,
    alphas: Sequence[float] = ALPHAS,
) -> Frames:
    """All frames of a collection; takes some milliseconds per setting and prompt.

    Raises:
        ValueError: there are no prompts, or none of the settings can be replayed.
        KeyError: the reward was not collected.
    """
    if not prompts:
        raise ValueError(f"{collection} has no prompts")
    settings = tuple(_settings(prompts, reward, alphas))
    if not settings:
        raise ValueError("no prefix was scored where a schedule would cut")
    full = best_of_n(prompts, reward)
    runs = _with_rewards(replayed(prompts, settings), full)
    return Frames(collection, reward, tuple(prompts), runs, full, prefixes(prompts, reward))


def _settings(
    prompts: Sequence[Trajectories], reward: str, alphas: Sequence[float]
) -> Iterator[Setting]:
    """All settings with every cut on the grid; the largest N first.

    Those with too little memory for one whole answer are left out.
    """
    limits = [prompt.max_tokens for prompt in prompts]
    most = min(prompt.n for prompt in prompts)
    halvings = [most // 2**i for i in range(4)]
    for n in [n for n in halvings if n >= _MIN_N] or [most]:
        for schedule in map(parse_schedule, _SCHEDULES):
            is_memory = schedule.kind == "memory"
            fits = not is_memory or (min(limits) > _MEMORY_TOKENS <= max(limits) <= n * 16)
            cuts = is_memory or decision_tokens(schedule, min(limits))
            if fits and cuts and _is_scored(prompts, reward, schedule):
                for alpha in alphas:
                    yield Setting(n, alpha, schedule, reward)


def _is_scored(prompts: Sequence[Trajectories], reward: str, schedule: Schedule) -> bool:
    """Whether prefixes were scored wherever the schedule cuts.

    Full slots end a round at the grid position before, so the first position matters too.
    """
    if reward == LIKELIHOOD:
        return True
    if schedule.kind == "memory":
        return all(prompt.positions[0] <= _MEMORY_TOKENS for prompt in prompts)
    return all(
        {*decision_tokens(schedule, prompt.max_tokens)} <= {*prompt.positions.tolist()}
        for prompt in prompts
    )


def replayed(prompts: Sequence[Trajectories], settings: Sequence[Setting]) -> pd.DataFrame:
    """A row per setting and prompt; see `Frames.runs`, without reward.

    Raises:
        ValueError: a round ends where no prefix was scored, or a prompt has fewer answers than N.
    """
    rows = []
    for number, prompt in enumerate(prompts):
        for setting in settings:
            n = setting.n
            if n > prompt.n:
                raise ValueError(f"{n} candidates of {prompt.n} that were generated")
            slots = 0
            if setting.schedule.kind == "memory":
                slots = prompt.prompt_tokens + n * _MEMORY_TOKENS
            name = {"n": n, "alpha": setting.alpha, "schedule": str(setting.schedule)}
            for start in range(0, prompt.n - n + 1, n)[:_MAX_GROUPS]:
                candidates = np.arange(start, start + n)
                run = replay(prompt, replace(setting, slots=slots), candidates)
                tokens = {"tokens": run.generated_tokens, "full_tokens": run.best_of_n_tokens}
                rows.append({**name, "prompt": number, **tokens, "regret": run.regret})
    return pd.DataFrame(rows).groupby([*SETTING, "prompt"], sort=False).mean().reset_index()


def _with_rewards(runs: pd.DataFrame, full: pd.DataFrame) -> pd.DataFrame:
    same = full[["prompt", "n", "reward"]]
    merged = runs.merge(same, on=["prompt", "n"], how="left", validate="many_to_one")
    merged["reward"] -= merged.regret
    return merged


def best_of_n(prompts: Sequence[Trajectories], reward: str) -> pd.DataFrame:
    """A row per prompt and n; see `Frames.full`."""
    parts = []
    for number, prompt in enumerate(prompts):
        rising = np.sort(prompt.final(reward))
        ns = np.arange(1, prompt.n + 1)
        part = {
            "prompt": number,
            "n": ns,
            "reward": expected_first(rising[::-1])[1:],
            "worst": expected_first(rising)[1:],
            "tokens": ns * prompt.num_tokens.mean(),
        }
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


def prefixes(prompts: Sequence[Trajectories], reward: str) -> pd.DataFrame:
    """At 4, 8, 16, ... tokens as far as prefixes were scored there; see `Frames.prefixes`."""
    scored = set.intersection(*({*prompt.positions.tolist()} for prompt in prompts))
    limit = min(prompt.max_tokens for prompt in prompts)
    positions = [2**i for i in range(2, 20) if 2**i < limit and 2**i in scored]
    parts = [pd.DataFrame(columns=["prompt", "position", "score", "final", "live", "best"])]
    for number, prompt in enumerate(prompts):
        final = prompt.final(reward)
        best = np.arange(prompt.n) == np.argmax(final)
        for position in positions:
            live = prompt.num_tokens > position
            score = np.where(live, prompt.partial(reward, position), final)
            of = {"prompt": number, "position": position}
            columns = {"score": score, "final": final, "live": live, "best": best}
            parts.append(pd.DataFrame(of | columns))
    return pd.concat(parts[1:] or parts, ignore_index=True)
