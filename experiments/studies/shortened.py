"""The same answers under a smaller limit: what they would have been, exactly.

A token depends on seed, candidate and step alone, so the first tokens of a long answer are those of
a short one. Texts stay whole: how the first tokens read by themselves is not kept.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.trajectories import FloatArray, PrefixScores, Trajectories, likelihood
from orchestrator.composition import LIKELIHOOD


def shortened(prompt: Trajectories, max_tokens: int) -> Trajectories:
    """With `max_tokens` for a limit.

    Raises:
        ValueError: more than there are.
        OffGrid: prefixes were not scored there.
    """
    if max_tokens > prompt.max_tokens:
        raise ValueError(f"{prompt.prompt_id} was written to {prompt.max_tokens} tokens only")
    kept = prompt.positions <= max_tokens
    num_tokens = prompt.num_tokens.clip(max=max_tokens)
    logprobs, positions = prompt.logprobs[:, :max_tokens], prompt.positions[kept]
    rewards = {
        name: PrefixScores(scores.partial[:, kept], _finals(prompt, name, max_tokens))
        for name, scores in prompt.rewards.items()
        if name != LIKELIHOOD
    }
    rewards[LIKELIHOOD] = likelihood(logprobs, num_tokens, positions)
    return replace(
        prompt,
        max_tokens=max_tokens,
        positions=positions,
        num_tokens=num_tokens,
        finished=prompt.finished & (prompt.num_tokens <= max_tokens),
        logprobs=logprobs,
        rewards=rewards,
    )


def _finals(prompt: Trajectories, reward: str, max_tokens: int) -> FloatArray:
    final = prompt.scores(reward).final
    if max_tokens == prompt.max_tokens:
        return final
    cut = prompt.num_tokens > max_tokens
    return np.where(cut, prompt.partial_at(reward, max_tokens), final)
