"""Classifiers on vLLM score as on the service's own network.

`make conformance` runs these tests where vLLM is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from reward_service.kinds import classifier
from reward_service.reward import RewardLost, score, score_batch
from reward_service.worker import Worker
from specrej.contracts import FinishReason, Prompt
from specrej.contracts.errors import InvalidRequest, Unavailable
from tests.reward_service import tiny
from tests.reward_service.tiny import CONTEXT, PROMPT, TEXTS, make_config, make_tokenizer, save
from tests.specrej_models.test_vllm_options import end_with_service

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment: make vllm"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with two labels, and with heads of a size that vLLM's kernels support."""
    return saved(tmp_path_factory.mktemp("classifier"), 0)


def saved(directory: Path, pad_id: int) -> Path:
    config = make_config("llama", pad_id, head_dim=32, num_labels=2)
    return save(directory, config, make_tokenizer("<pad>" if pad_id == 0 else tiny.EOS))


def loaded(directory: Path, **options: Any) -> Any:
    options = {"label": 1, "kept_tokens": 2048} | options
    return tiny.load("classifier", directory, **options)


on_vllm = partial(loaded, engine="vllm", vllm_options={"enforce_eager": True})


@pytest.fixture(scope="module")
def by_vllm(directory: Path) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        reward = on_vllm(directory)
    yield reward
    reward.close()


class FakeEngine:
    """In vLLM's place: the logits of a text are its number of tokens and its last token."""

    requests: ClassVar[list[list[int]]] = []
    arguments: ClassVar[dict[str, Any]]  # of the engine made last
    errored = False

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any]) -> FakeEngine:
        cls.arguments = arguments
        return cls()

    async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        self.requests.append(ids)
        outputs = SimpleNamespace(data=torch.tensor([len(ids), ids[-1]]))
        yield SimpleNamespace(outputs=outputs, prompt_token_ids=ids, num_cached_tokens=5)

    def shutdown(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What `FakeEngine` receives."""
    module = SimpleNamespace(
        __spec__="installed",
        AsyncEngineArgs=dict,
        AsyncLLMEngine=FakeEngine,
        PoolingParams=lambda **options: options,
    )
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(classifier, "prepare_environment", lambda threads: None)
    monkeypatch.setattr(classifier, "end_children_with_us", lambda: None)
    monkeypatch.setattr(FakeEngine, "requests", [])
    return FakeEngine.requests


def test_scores_are_a_labels_logits_of_each_different_text(
    directory: Path, fake: list[list[int]]
) -> None:
    """Guards equal texts, a label and the accounts where vLLM is not installed."""
    reward = on_vllm(directory)
    scores = score_batch(reward.open(PROMPT), reward, tiny.batch({0: "ab", 1: "abc", 2: "ab"}))
    made = FakeEngine.arguments
    assert (made["enforce_eager"], made["max_model_len"]) == (True, CONTEXT)
    first, second = fake
    assert len(second) == len(first) + 1
    assert scores.values == (first[-1], second[-1], first[-1])
    assert scores.computed_tokens == len(first) + len(second) - 10
    with pytest.raises(ValueError, match="has 2 labels, label must be the index"):
        on_vllm(directory, label=None)
    reward.close()


def test_padding_at_the_end_is_not_read(tmp_path: Path, fake: list[list[int]]) -> None:
    """Guards models whose padding is their end of text: their heads were not trained on it."""
    reward = on_vllm(saved(tmp_path, 2))
    score(reward, PROMPT, ["ab"])
    (read,) = fake
    assert 2 not in read[-2:]
    reward.close()


@pytest.mark.usefixtures("fake")
def test_a_bias_that_vllm_would_leave_out_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    weights = load_file(tmp_path / "model.safetensors") | {"score.bias": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"score\.weight alone, not score\.bias"):
        on_vllm(tmp_path)


def test_a_failure_of_the_engine_is_raised_as_itself(
    directory: Path, fake: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a group, which has neither a status nor a place in the log."""

    async def fails(*_: Any) -> AsyncIterator[Any]:
        raise Unavailable("the engine is dead")
        yield

    monkeypatch.setattr(FakeEngine, "encode", fails)
    reward = on_vllm(directory)
    with pytest.raises(Unavailable, match="dead"):
        score(reward, PROMPT, ["ab", "c"])
    monkeypatch.setattr(FakeEngine, "errored", True)
    with pytest.raises(RewardLost):
        score(reward, PROMPT, ["ab", "c"])
    reward.close()


@pytest.mark.parametrize(("device", "numbers"), [("cuda", None), ("cuda:1", [1])])
@pytest.mark.usefixtures("fake")
def test_on_cuda_it_is_vllm_with_the_services_settings(
    directory: Path, device: str, numbers: list[int] | None
) -> None:
    """Guards against a reward beside the generator on the first GPU, with the second one idle, and
    against one that takes, or waits for, the memory of the models beside it."""
    reward = loaded(directory, device=device)
    made = FakeEngine.arguments
    assert made.get("device_ids") == numbers
    assert made["kv_cache_memory_bytes"] == (2048 + 256) * 512  # kept_tokens, and one block
    assert made["gpu_memory_utilization"] < 0.1
    assert reward.token_budget > 2**15, "vLLM would wait between small calls"
    assert reward.fingerprint == loaded(directory, device=device, engine="vllm").fingerprint
    own = {loaded(directory, engine=engine).fingerprint for engine in ("auto", "own")}
    assert len(own) == 1
    assert loaded(directory, engine="vllm").fingerprint not in own
    reward.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, ""),
        ({"engine": "own"}, ""),
        ({"head_file": Path(__file__), "label": 0}, "vLLM does not read head_file"),
        ({"is_installed": False}, "vLLM is not installed"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_vllm_does_not_compute_is_computed_by_torch(
    directory: Path,
    options: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards the reason, which is an error where vLLM is required."""
    if not (options := {"device": "cuda"} | options).pop("is_installed", True):
        monkeypatch.setattr(classifier, "find_spec", lambda name: None)
    own = SimpleNamespace()
    monkeypatch.setattr(classifier, "_load_own", lambda *_: own)
    assert loaded(directory, **options) is own
    assert reason in caplog.text
    assert bool(reason) == bool(caplog.text)
    if reason:
        with pytest.raises(ValueError, match=reason):
            loaded(directory, **options, engine="vllm")


@needs_vllm
def test_scores_are_those_of_our_own_classifier(directory: Path, by_vllm: Any) -> None:
    own = loaded(directory)
    values = score(own, PROMPT, TEXTS).values
    assert score(by_vllm, PROMPT, TEXTS).values == pytest.approx(values, abs=1e-3)
    assert max(values) - min(values) > 0.1, "equal scores would prove nothing"
    with pytest.raises(InvalidRequest, match="takes"):
        by_vllm.open(Prompt.from_user("x" * (CONTEXT + 1)))


@needs_vllm
async def test_cached_tokens_change_no_score(directory: Path, by_vllm: Any) -> None:
    """And they are not computed again."""
    own = loaded(directory)
    text = "".join(chr(97 + i * i % 26) for i in range(150))
    worker = await Worker.start(lambda: by_vllm)
    try:
        async with worker.open(PROMPT) as session:
            for end in (40, 80, 150):
                batch = tiny.batch({0: text[:end], 1: text[:end]})
                batch += tiny.batch({2: text[:end] + "!"}, FinishReason.STOP)
                scores = await session.score(batch)
                expected = score(own, PROMPT, [candidate.text for candidate in batch]).values
                assert scores.values == pytest.approx(expected, abs=1e-3)
                assert scores.values[0] == scores.values[1]
        assert 0 < scores.computed_tokens < 150
    finally:
        worker.close()


_START = """
from tests.reward_service import tiny
reward = tiny.load("classifier", sys.argv[1], label=1, engine="vllm")
"""


@needs_vllm
async def test_vllm_ends_with_a_service_that_is_killed(directory: Path) -> None:
    """Guards the memory of a GPU, and the titles that vLLM writes over its environment."""
    await end_with_service(_START, str(directory))
