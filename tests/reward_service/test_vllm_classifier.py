"""The same model on vLLM and on our own network: the same scores.

What needs vLLM runs where that is: make conformance.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoConfig

from reward_service.catalog import load_reward
from reward_service.causal_reward import Options
from reward_service.classifier import Transform
from reward_service.reward import score
from reward_service.settings import RewardSettings, RewardSpec
from reward_service.vllm_classifier import VLLMClassifier
from reward_service.worker import Worker
from specrej.contracts import Candidate, FinishReason, Prompt
from specrej.errors import InvalidRequest
from tests.reward_service.tiny import CONTEXT, PROMPT, TEXTS, make_config, make_tokenizer, save

SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)
SETTINGS = RewardSettings(threads=1, kept_tokens=2048)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not in this environment: make vllm",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose heads are of a size that vLLM's kernels take, with two labels."""
    config = make_config("llama", 0, head_dim=32, num_labels=2)
    return save(tmp_path_factory.mktemp("classifier"), config, make_tokenizer("<pad>"))


def loaded(kind: str, directory: Path, **options: Any) -> Any:
    spec = {"name": "r", "kind": kind, "directory": directory, "label_weights": [1.0, -0.5]}
    return load_reward(SPECS.validate_python(spec | options), SETTINGS)


@pytest.fixture(scope="module")
def by_vllm(directory: Path) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        reward = loaded("vllm-classifier", directory, vllm_options={"enforce_eager": True})
    yield reward
    reward.close()


def test_what_vllm_is_told_is_in_the_fingerprint(directory: Path) -> None:
    """Guards against scores of different arithmetic in one ranking, or one for the other's."""
    options = Options("r", directory)
    conversation = options.conversation(AutoConfig.from_pretrained(directory))

    def of(**told: object) -> str:
        reward = VLLMClassifier(
            options,
            _Nobody(),
            None,
            conversation,
            label_weights=[1.0, -0.5],
            transform=Transform(),
            vllm_options=told,
        )
        reward.close()
        return reward.fingerprint

    assert of(quantization="fp8") == of(quantization="fp8")
    assert of() != of(quantization="fp8")


class _Nobody:
    """Stands for a vLLM."""

    def shutdown(self) -> None:
        """There is nothing to end."""


def test_its_options_are_checked() -> None:
    spec = {"name": "r", "kind": "vllm-classifier", "directory": "."}
    assert SPECS.validate_python(spec | {"vllm_options": {"tensor_parallel_size": 2}})
    with pytest.raises(ValidationError, match="vllm_option"):
        SPECS.validate_python(spec | {"vllm_option": {}})


@needs_vllm
def test_scores_are_those_of_our_own_classifier(directory: Path, by_vllm: Any) -> None:
    own = score(loaded("classifier", directory), PROMPT, TEXTS).values
    assert score(by_vllm, PROMPT, TEXTS).values == pytest.approx(own, abs=1e-3)
    assert max(own) - min(own) > 0.1, "a model that tells nothing apart proves nothing"


@needs_vllm
async def test_growing_texts_are_scored_as_from_scratch(directory: Path, by_vllm: Any) -> None:
    """What is found in the prefix cache changes no score, and is not computed again."""
    own = loaded("classifier", directory)
    text = "".join(chr(97 + i * i % 26) for i in range(150))
    worker = await Worker.start(lambda: by_vllm)
    try:
        async with worker.open(PROMPT) as session:
            for end in (40, 80, 150):
                batch = [
                    Candidate(0, text[:end], end, 0.0),
                    Candidate(1, text[:end] + "!", end, 0.0, FinishReason.STOP),
                    Candidate(2, text[:end], end, 0.0),
                ]
                scores = await session.score(batch)
                expected = score(own, PROMPT, [each.text for each in batch]).values
                assert scores.values == pytest.approx(expected, abs=1e-3)
                assert scores.values[0] == scores.values[2]
        assert 0 < scores.computed_tokens < 150
    finally:
        worker.close()


@needs_vllm
def test_a_prompt_that_is_too_long_is_refused(by_vllm: Any) -> None:
    with pytest.raises(InvalidRequest, match="takes"):
        by_vllm.open(Prompt.from_user("x" * (CONTEXT + 1)))


@needs_vllm
def test_labels_and_weights_must_match(directory: Path) -> None:
    with pytest.raises(ValueError, match="has 2 labels, label_weights has 3"):
        loaded("vllm-classifier", directory, label_weights=[1.0, 1.0, 1.0])
