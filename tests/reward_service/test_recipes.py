"""The recipes of docs/rewards.md, on tiny random checkpoints of each model's architecture.

Each is compared with the code of the model's card, written here in plain transformers and torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reward_service.reward import score, score_batch
from specrej.contracts import FinishReason
from tests.reward_service import tiny
from tests.reward_service.tiny import BOS, PAD, PROMPT, TEXTS, batch, load

QUESTION = PROMPT.messages[0].content
PAGE = Path(__file__).parents[2] / "docs/rewards.md"


def recipes() -> dict[str, dict[str, Any]]:
    """By the last part of the model's name."""
    table = PAGE.read_text().partition("## Recipes")[2].replace("\\|", "|")
    rows = re.findall(r"^\| (\S+-.+) \| (?:none|`(\{.*\})`) \|$", table, re.MULTILINE)
    return {
        model.rpartition("/")[2]: {"kind": "classifier", **json.loads(options or "{}")}
        for models, options in rows
        for model in models.split(", ")
    }


@dataclass(frozen=True)
class Card:
    """A model of one card.

    strips, adds: whether the card's code removes the template's BOS, and whether its tokenizer adds
    one; num_bos: how many there are then.
    """

    family: str = "llama"
    adds: bool = False
    strips: bool = False
    num_bos: int = 1
    template: str = tiny.TEMPLATE
    changes: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        tokenizer = tiny.make_tokenizer(PAD, bos=self.family not in ("qwen2", "qwen3"))
        if self.template != tiny.TEMPLATE:
            tokenizer.chat_template = self.template
        config = tiny.make_config(self.family, 0, vocab_size=264, **self.changes)
        return tiny.save(directory, config, tokenizer)

    @torch.inference_mode()
    def reward(self, directory: Path, text: str) -> float:
        """By the card's code."""
        tokenizer, model = tiny.plain(directory)
        written = tiny.conversation(directory, text)
        written = written.replace(BOS, "") if self.strips else written
        options = {"add_special_tokens": self.adds, "return_tensors": "pt"}
        ids: Tensor = tokenizer(written, **options).input_ids
        if tokenizer.bos_token:
            assert ids[0].tolist().count(tokenizer.bos_token_id) == self.num_bos
        return float(model(ids).logits[0, 0])


TULU = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}{% endfor %}"
STRIPPED: dict[str, Any] = {"strips": True, "adds": True}
TWO_BOS: dict[str, Any] = {"adds": True, "num_bos": 2}
# The cards of FsfairX, GRM and AceMath were read for this; of the others, what is known of them.
CARDS = {
    "Skywork-Reward-Llama-3.1-8B-v0.2": Card(**STRIPPED),
    "Skywork-Reward-V2-Qwen3-8B": Card("qwen3", **STRIPPED, changes={"head_dim": 8}),
    "FsfairX-LLaMA3-RM-v0.1": Card(**STRIPPED),
    "RM-Mistral-7B": Card("mistral", **STRIPPED),
    "Llama-3.1-Tulu-3-8B-RM": Card(template=TULU, num_bos=0),
    "AceMath-7B-RM": Card("qwen2"),
    "GRM-Llama3-8B-rewardmodel-ft": Card(**TWO_BOS),
}


@pytest.mark.parametrize("name", recipes())
def test_recipe_scores_as_the_models_card(tmp_path: Path, name: str) -> None:
    """Guards heads that are not read, the token that is read, BOS that is missing or twice, and
    texts that grow: of those, only new tokens are computed."""
    card = CARDS[name]
    directory = card.save(tmp_path)
    reward = load(**recipes()[name] | {"directory": directory})
    expected = [card.reward(directory, text) for text in TEXTS]
    assert max(expected) - min(expected) > 0.05
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)
    session = reward.open(PROMPT)
    for part in (2, 5, 1, None):
        parts = {number: text[:part] for number, text in enumerate(TEXTS)}
        scores = score_batch(session, reward, batch(parts, FinishReason.STOP)).values
    assert scores == pytest.approx(expected, abs=1e-4)
