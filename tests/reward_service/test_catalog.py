"""What is declared is what is loaded; code that comes with a model runs only if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from reward_service.catalog import load_reward
from reward_service.reward import score
from reward_service.settings import RewardSettings, RewardSpec
from reward_service.worker import Worker
from specrej.contracts import Candidate, Prompt
from tests.reward_service.tiny import (
    PROMPT,
    make_config,
    make_tokenizer,
    save,
    save_language_model,
)

SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)
SETTINGS = RewardSettings(threads=1)


def brevity(prompt: Prompt, responses: list[str]) -> list[int]:
    """Shorter is better."""
    return [-len(response) for response in responses]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    return save(directory, make_config("llama", None), make_tokenizer(None))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("words")
    return save_language_model(directory, make_config("llama", None), make_tokenizer(None))


def loaded(**spec: Any) -> Any:
    return load_reward(SPECS.validate_python({"name": "r", **spec}), SETTINGS)


def test_every_kind_without_a_model_is_found() -> None:
    assert "vowels" in loaded(kind="toy").description
    assert (
        loaded(kind="function", function=f"{__name__}:brevity").description == "Shorter is better."
    )
    assert "HTTP" in loaded(kind="http", url="http://127.0.0.1:1/").description
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1"):
        loaded(kind="grpc", address="127.0.0.1:1", timeout_s=0.1)


def test_every_kind_on_words_is_found(words: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "likelihood": {"reference": words, "beta": 0.1},
        "pairwise": {"opponents": 1},
        "process": {"good": "+", "bad": "-", "step_token": "@"},
    }
    told = {
        kind: loaded(kind=kind, directory=words, **options).description
        for kind, options in kinds.items()
    }
    assert "likelier" in told["likelihood"]
    assert "prefers" in told["pairwise"]
    assert "steps" in told["process"]
    with pytest.raises(ValueError, match="lacks the weights regression_layer"):
        loaded(kind="gated", directory=words, gate_at="<assistant>")


def test_what_is_declared_for_a_classifier_reaches_it(classifier: Path) -> None:
    """Guards every option against being read and left out."""
    plain = score(loaded(kind="classifier", directory=classifier), PROMPT, ["a", "b"]).values
    transform = {"kind": "sigmoid", "scale": 2.0, "offset": 1.0}
    squashed = loaded(kind="classifier", directory=classifier, transform=transform)
    expected = [2 * float(torch.tensor(value).sigmoid()) + 1 for value in plain]
    assert score(squashed, PROMPT, ["a", "b"]).values == pytest.approx(expected, abs=1e-5)
    doubled = loaded(kind="classifier", directory=classifier, label_weights=[2.0])
    assert score(doubled, PROMPT, ["a", "b"]).values == pytest.approx([2 * v for v in plain])
    for option in (
        {"special_tokens": "tokenizer"},
        {"unfinished": "open"},
        {"format": "{prompt} {response}"},
    ):
        other = loaded(kind="classifier", directory=classifier, **option)
        assert other.fingerprint != loaded(kind="classifier", directory=classifier).fingerprint


@pytest.mark.parametrize("option", ["directory", "head", "adapter"])
def test_a_missing_file_is_told(classifier: Path, tmp_path: Path, option: str) -> None:
    paths = {"directory": classifier, option: tmp_path / "gone"}
    with pytest.raises(FileNotFoundError, match=r"reward r: no .* .*gone"):
        loaded(kind="classifier", **paths)


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "likelihood", "unfinished": "open"},
        {"kind": "pairwise"},
        {"kind": "process", "good": "+", "bad": "-", "step_token": "@"},
    ],
    ids=lambda kind: str(kind["kind"]),
)
async def test_a_worker_serves_every_kind_and_batches_with_nothing_new(
    words: Path, kind: dict[str, Any]
) -> None:
    """A lone text has nobody to be compared with, a repeated one nothing to compute: there was no
    forward pass for them, and the empty one failed."""
    worker = await Worker.start(lambda: loaded(directory=words, **kind))
    try:
        async with worker.open(PROMPT) as session:
            batch = [Candidate(0, "One.\n\nTw", 0, 0.0), Candidate(1, "", 0, 0.0)]
            first = await session.score(batch)
            again = await session.score(batch)
            assert again.values == pytest.approx(first.values, abs=1e-5)
            assert len((await session.score(batch[:1])).values) == 1
    finally:
        worker.close()


def test_a_plain_format_has_its_special_tokens_from_the_tokenizer(classifier: Path) -> None:
    """Guards against texts without BOS: there is no template to write it."""
    reward = loaded(kind="classifier", directory=classifier, format="{prompt} {response}")
    (ids,) = reward.conversation.encode(["a"])
    assert ids[0] == reward.conversation.tokenizer.bos_token_id


CUSTOM = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaModel):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_only_if_asked_for(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the machine against whoever made the directory."""
    for path in classifier.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    told = json.loads((tmp_path / "config.json").read_text())
    told["model_type"] = "own-llama"
    told["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    marker = tmp_path / "ran.txt"
    (tmp_path / "own.py").write_text(
        CUSTOM.replace('pathlib.Path(__file__).with_name("ran")', f'pathlib.Path("{marker}")')
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    with pytest.raises((ValueError, OSError)):
        loaded(kind="classifier", directory=tmp_path)
    assert not marker.exists()
    trusted = loaded(kind="classifier", directory=tmp_path, trust_remote_code=True)
    assert marker.exists()
    plain = loaded(kind="classifier", directory=classifier)
    expected = score(plain, PROMPT, ["a", "b"]).values
    assert score(trusted, PROMPT, ["a", "b"]).values == pytest.approx(expected, abs=1e-5)
