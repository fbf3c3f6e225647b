"""A linear Bradley-Terry head on a frozen backbone, from features that are computed once.

A pair of answers is right if the chosen one scores higher than the rejected one; the head is the
linear map that makes that likeliest (Bradley and Terry 1952), with weight decay, from the hidden
states at the last token of each conversation. These are kept in a file: a run that was stopped goes
on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from reward_service.causal import CausalScorer
from reward_service.causal_reward import CausalReward, LastToken, Options, batch_values
from reward_service.pairs import Pair, share_right
from reward_service.reward import whole_answers
from specrej import fingerprint

# Weight decays to try, strong to weak.
_DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)

# Pairs between two notes of how far it is; what lies between them is computed again after a stop.
_PAIRS_AT_ONCE = 16

# Tells whoever waits.
Note = Callable[[str], None]


def fit_head(differences: Tensor, validation: Tensor, note: Note) -> tuple[Tensor, float]:
    """The head's weights [hidden], and the weight decay that they were found with.

    differences: chosen - rejected features [pairs, hidden]. Decays are tried from strong to weak,
    until the held-out loss has risen twice; with the best of them, all pairs are fitted again.
    """
    scale = torch.cat((differences, validation)).std(dim=0).clamp(min=1e-6)
    best_decay, best_loss, rises = _DECAYS[0], math.inf, 0
    for decay in _DECAYS:
        weights = _fit(differences / scale, decay)
        loss = -F.logsigmoid(validation / scale @ weights).mean().item()
        right = share_right((validation / scale @ weights).tolist())
        note(f"decay {decay}: held-out loss {loss:.4f}, accuracy {right:.3f}")
        if loss < best_loss:
            best_decay, best_loss = decay, loss
        else:
            rises += 1
        if rises == 2:
            break
    return _fit(torch.cat((differences, validation)) / scale, best_decay) / scale, best_decay


def _fit(inputs: Tensor, decay: float) -> Tensor:
    """Minimises mean(-log sigmoid(inputs . weights)) + decay / 2 * |weights|^2, by L-BFGS."""
    weights = torch.zeros(inputs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def objective() -> float:
        optimizer.zero_grad()
        loss = -F.logsigmoid(inputs @ weights).mean() + decay / 2 * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weights.detach()


class _States(LastToken):
    """Reads what the head will see, and makes no score of it."""

    def score(self, values: Tensor) -> float:
        return math.nan


def load_reader(backbone: Path) -> CausalReward:
    """A reward whose values are the states at the last token."""
    options = Options("training", backbone)
    model = options.backbone()
    conversation = options.conversation(model.config)
    scorer = CausalScorer(model, lambda states, _: states.float(), options.kept_tokens)
    return CausalReward(options, "", "", conversation, scorer, _States())


def features(backbone: Path, pairs: Sequence[Pair], kept: Path, note: Note) -> NDArray[np.float32]:
    """What the head sees of each pair, [pairs, 2, hidden]; chosen answers first.

    Kept in a file as far as they are computed; those that are there already are read.
    """
    reward = load_reader(backbone)
    hidden: int = reward.scorer.hidden_size
    shape, digest = (len(pairs), 2, hidden), _digest(backbone, pairs)
    done_file = kept.with_suffix(".done")
    done = 0
    if kept.exists() and done_file.exists():
        known, count = done_file.read_text().split()
        done = int(count) if known == digest else 0
    if not done:  # nothing may vouch for what is overwritten now
        done_file.unlink(missing_ok=True)
    found = np.lib.format.open_memmap(
        kept, mode="r+" if done else "w+", dtype=np.float32, shape=None if done else shape
    )
    if done == len(pairs):
        return np.asarray(found)
    for number in range(done, len(pairs)):
        found[number] = pair_states(reward, pairs[number]).numpy()
        if (number + 1) % _PAIRS_AT_ONCE == 0 or number + 1 == len(pairs):
            found.flush()
            partly = done_file.with_suffix(".part")
            partly.write_text(f"{digest} {number + 1}")
            partly.replace(done_file)
            note(f"features of {number + 1} of {len(pairs)} pairs")
    return np.asarray(found)


def pair_states(reward: CausalReward, pair: Pair) -> Tensor:
    """[2, hidden]; nothing is kept."""
    session = reward.open(pair.prompt)
    try:
        values = batch_values(session, reward, whole_answers([pair.chosen, pair.rejected]))
        return torch.stack([value[-1] for value in values])
    finally:
        session.close()


def _digest(backbone: Path, pairs: Sequence[Pair]) -> str:
    """Of all that features depend on."""
    return fingerprint.of_directory(backbone, {"pairs": repr(pairs)})
