"""A Bradley-Terry head and a low-rank adapter, trained together on preference pairs.

The whole network takes part, so it finds more than a head on frozen states does, and takes hours on
a CPU where that takes minutes. After every epoch the state is kept: a run that was stopped goes on
with the next one. It ends early when the held-out loss has risen twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from reward_service import lora
from reward_service.batching import pad
from reward_service.causal_reward import Options
from reward_service.classifier import HEAD_TENSOR
from reward_service.conversation import Conversation
from reward_service.head import Note
from reward_service.pairs import Pair
from specrej import fingerprint

_STATE = "training.pt"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the adapter is trained; learning_rate is AdamW's."""

    rank: int = 8
    epochs: int = 3
    pairs_at_once: int = 8
    learning_rate: float = 2e-4
    seed: int = 0


@dataclass(slots=True)
class _Progress:
    """After so many epochs; losses on the held-out pairs."""

    epoch: int = 0
    best_loss: float = math.inf
    rises: int = 0


class LoraFit:
    """One run; `adapter` and `head` under `out` are the best so far."""

    def __init__(
        self, backbone: Path, out: Path, schedule: Schedule, digest: str, note: Note
    ) -> None:
        """`digest`: of the pairs; another one's state is not gone on with."""
        torch.manual_seed(schedule.seed)
        options = Options("training", backbone)
        model = options.backbone()
        self.adapter = out / "adapter"
        self.head = self.adapter / "head.safetensors"  # they belong together
        self._schedule = schedule
        self._digest = fingerprint.of_values(pairs=digest, schedule=repr(schedule))
        self._note = note
        self._conversation: Conversation = options.conversation(model.config)
        self._model: Any = lora.wrapped(model, schedule.rank)
        self._head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self._head.weight)
        self._trained = [
            *(each for each in self._model.parameters() if each.requires_grad),
            *self._head.parameters(),
        ]
        self._optimizer = torch.optim.AdamW(self._trained, lr=schedule.learning_rate)
        self._state = out / _STATE
        self._progress = self._resume()

    def run(self, fitting: Sequence[Pair], validation: Sequence[Pair]) -> None:
        """Train to the end."""
        while self._progress.epoch < self._schedule.epochs and self._progress.rises < 2:
            self._epoch(fitting)
            self._judge(validation)
            self._keep()

    def _epoch(self, pairs: Sequence[Pair]) -> None:
        self._model.train()
        number = self._progress.epoch + 1
        shuffled = random.Random(self._schedule.seed + number).sample(list(pairs), len(pairs))
        done = 0
        for batch in self._batches(shuffled):
            loss = -F.logsigmoid(self._margins(batch)).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._trained, 1.0)
            self._optimizer.step()
            done += len(batch)
            self._note(
                f"epoch {number}: {done} of {len(pairs)} pairs, loss {float(loss.detach()):.4f}"
            )
        self._progress.epoch = number

    @torch.no_grad()
    def _judge(self, pairs: Sequence[Pair]) -> None:
        """Keep the weights if they are the best so far on pairs held out."""
        self._model.eval()
        margins = torch.cat([self._margins(batch) for batch in self._batches(pairs)])
        loss = float(-F.logsigmoid(margins).mean())
        right = float((margins > 0).float().mean())
        number = self._progress.epoch
        self._note(f"epoch {number}: held-out loss {loss:.4f}, accuracy {right:.3f}")
        if loss < self._progress.best_loss:
            self._progress.best_loss = loss
            lora.save(self._model, self.adapter)
            save_file({HEAD_TENSOR: self._head.weight.detach()[0].clone()}, self.head)
        else:
            self._progress.rises += 1

    def _margins(self, pairs: Sequence[Pair]) -> Tensor:
        """How far the chosen answers are ahead, [pairs]."""
        rows = [row for pair in pairs for row in self._tokens(pair)]
        mask = torch.tensor(pad([[1] * len(row) for row in rows]))
        states = self._model(
            input_ids=torch.tensor(pad(rows)), attention_mask=mask, use_cache=False
        ).last_hidden_state
        last = states[torch.arange(len(rows)), mask.sum(dim=1) - 1]
        margins: tuple[Tensor, ...] = self._head(last).view(-1, 2).unbind(dim=1)
        return margins[0] - margins[1]

    def _tokens(self, pair: Pair) -> list[list[int]]:
        turns = self._conversation.turns(pair.prompt)
        tokenized = turns.tokenize([pair.chosen, pair.rejected], [True, True])
        return [each.token_ids for each in tokenized]

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        size = self._schedule.pairs_at_once
        return (pairs[at : at + size] for at in range(0, len(pairs), size))

    def _keep(self) -> None:
        trained = [each.detach() for each in self._trained]
        optimizer = self._optimizer.state_dict()
        whole = {"digest": self._digest, "trained": trained, "optimizer": optimizer}
        progress = self._progress
        whole["progress"] = (progress.epoch, progress.best_loss, progress.rises)
        partly = self._state.with_suffix(".part")
        torch.save(whole, partly)
        partly.replace(self._state)

    def _resume(self) -> _Progress:
        if not self._state.exists():
            return _Progress()
        kept = torch.load(self._state, weights_only=True)
        if kept["digest"] != self._digest:
            return _Progress()
        with torch.no_grad():
            for parameter, value in zip(self._trained, kept["trained"], strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(kept["optimizer"])
        progress = _Progress(*kept["progress"])
        self._note(f"goes on after epoch {progress.epoch}")
        return progress
