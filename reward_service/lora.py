"""Low-rank adapters (Hu et al. 2021) by peft: adding one to a model, training one with a head.

Training changes the whole network, so it reaches a lower loss than a head on frozen states; on a
CPU it takes hours, a head takes minutes. The state is written after every epoch, and an interrupted
run continues from it. Training ends early when the held-out loss has failed to improve twice.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from reward_service.checkpoint import load_backbone
from reward_service.conversation import load_conversation
from reward_service.kinds.classifier import HEAD_TENSOR
from reward_service.specs import ClassifierSpec, Resources
from specrej import fingerprint

if TYPE_CHECKING:
    from reward_service.training import Pair

_STATE = "training.pt"
_BATCH_PAIRS = 8
_LEARNING_RATE = 2e-4  # AdamW's


def merged(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """The model with an adapter added to its weights, which costs no time per pass.

    Raises:
        ValueError: the directory holds no adapter for this model.
    """
    if not (directory / "adapter_config.json").is_file():
        raise ValueError(f"{directory}: holds no adapter")
    try:
        with warnings.catch_warnings():
            # Peft only warns if an adapter's names are not the model's, and adds nothing.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            adapted: Any = PeftModel.from_pretrained(model, str(directory))
    except UserWarning:
        raise ValueError(f"{directory}: an adapter of another kind of model") from None
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole


class LoraFit:
    """One run; `adapter` and `head`, files under `out`, are the best so far."""

    def __init__(
        self,
        backbone: Path,
        out: Path,
        digest: str,
        note: Callable[[str], None],
        *,
        rank: int,
        epochs: int,
        seed: int,
    ) -> None:
        """digest: of the pairs and their division; the state of a run with another one is not
        used."""
        torch.manual_seed(seed)
        spec = ClassifierSpec(name="training", directory=backbone)
        model = load_backbone(spec, Resources())
        self.adapter = out / "adapter"
        self.head = self.adapter / "head.safetensors"  # they belong together
        self._epochs = epochs
        self._seed = seed
        self._digest = fingerprint.of_values(pairs=digest, rank=rank, epochs=epochs, seed=seed)
        self._note = note
        self._conversation = load_conversation(spec, model.config)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=0.05,
            target_modules="all-linear",
            task_type=TaskType.FEATURE_EXTRACTION,
        )
        self._model: Any = get_peft_model(model, config)
        self._head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self._head.weight)
        self._trained = [
            *(parameter for parameter in self._model.parameters() if parameter.requires_grad),
            *self._head.parameters(),
        ]
        self._optimizer = torch.optim.AdamW(self._trained, lr=_LEARNING_RATE)
        self._state = out / _STATE
        self._epoch, self._best_loss, self._rises = self._resume()

    def run(self, fitting: Sequence[Pair], validation: Sequence[Pair]) -> None:
        """Train to the end."""
        while self._epoch < self._epochs and self._rises < 2:
            self._epoch += 1
            self._fit(fitting)
            self._evaluate(validation)
            self._save()

    def _fit(self, pairs: Sequence[Pair]) -> None:
        self._model.train()
        number = self._epoch
        shuffled = random.Random(self._seed + number).sample(list(pairs), len(pairs))
        done = 0
        for batch in _batches(shuffled):
            loss = -F.logsigmoid(self._margins(batch)).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._trained, 1.0)
            self._optimizer.step()
            done += len(batch)
            self._note(f"epoch {number}: {done} of {len(pairs)} pairs, loss {loss.item():.4f}")

    @torch.no_grad()
    def _evaluate(self, pairs: Sequence[Pair]) -> None:
        """Write the weights if they are the best so far on held-out pairs."""
        self._model.eval()
        margins = torch.cat([self._margins(batch) for batch in _batches(pairs)])
        loss = float(-F.logsigmoid(margins).mean())
        right = float((margins > 0).float().mean())
        self._note(f"epoch {self._epoch}: held-out loss {loss:.4f}, accuracy {right:.3f}")
        if loss < self._best_loss:
            self._best_loss = loss
            self._model.save_pretrained(str(self.adapter))
            save_file({HEAD_TENSOR: self._head.weight.detach()[0].clone()}, self.head)
        else:
            self._rises += 1

    def _margins(self, pairs: Sequence[Pair]) -> Tensor:
        """Scores of the chosen answers less those of the rejected ones, [pairs]."""
        rows: list[Tensor] = []
        for pair in pairs:
            turns = self._conversation.turns(pair.prompt)
            answers = turns.tokenize([pair.chosen, pair.rejected], [True, True])
            rows += [torch.tensor(tokens.token_ids) for tokens in answers]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = pad_sequence(rows, batch_first=True)
        states = self._model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = states[torch.arange(len(rows)), mask.sum(dim=1) - 1]
        scores: Tensor = self._head(last).view(-1, 2)
        return scores[:, 0] - scores[:, 1]

    def _save(self) -> None:
        state = {
            "digest": self._digest,
            "trained": [parameter.detach() for parameter in self._trained],
            "optimizer": self._optimizer.state_dict(),
            "progress": (self._epoch, self._best_loss, self._rises),
        }
        partial_file = self._state.with_suffix(".part")
        torch.save(state, partial_file)
        partial_file.replace(self._state)

    def _resume(self) -> tuple[int, float, int]:
        """The epochs done, the lowest held-out loss, and how often it has risen."""
        if not self._state.exists():
            return 0, math.inf, 0
        state = torch.load(self._state, weights_only=True)
        if state["digest"] != self._digest:
            return 0, math.inf, 0
        with torch.no_grad():
            for parameter, value in zip(self._trained, state["trained"], strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(state["optimizer"])
        epoch, best_loss, rises = state["progress"]
        self._note(f"continues after epoch {epoch}")
        return epoch, best_loss, rises


def _batches(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    return (pairs[at : at + _BATCH_PAIRS] for at in range(0, len(pairs), _BATCH_PAIRS))
