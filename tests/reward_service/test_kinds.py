"""What every kind of reward must do, by its spec; each kind's own scores are tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from reward_service.reward import score, score_batch, take_fairly
from reward_service.specs import LocalSpec, Resources, RewardSpec, Transform
from reward_service.worker import Worker
from specrej.contracts import Prompt
from specrej.contracts.errors import InvalidRequest
from tests.reward_service.test_encoder import CONFIGS, save_cross_encoder
from tests.reward_service.test_gated import GATE_AT, save_gated
from tests.reward_service.tiny import PROMPT, batch, load, make_config, save


def brevity(prompt: Prompt, responses: list[str]) -> list[int]:
    return [-len(response) for response in responses]


save_words = partial(save, auto_class=AutoModelForCausalLM)
TWO_LABELS = make_config("llama", None, num_labels=2)
save_labels = partial(save, config=TWO_LABELS, auto_class=AutoModelForTokenClassification)
WORDS = {"good": "+", "bad": "-"}

# How a tiny model of the kind is saved, and options beside it. Not here: vllm-classifier, http and
# grpc, which need more than this process.
CAUSAL: dict[str, tuple[str, Callable[[Path], Path], dict[str, Any]]] = {
    "classifier": ("classifier", save, {}),
    "gated": ("gated", save_gated, {"gate_at": GATE_AT}),
    "likelihood": ("likelihood", save_words, {}),
    "contrast": ("likelihood", save_words, {"reference": True, "beta": 0.1}),
    "process by labels": ("process", save_labels, {"step_token": "@", "aggregate": "mean"}),
    "process by words": ("process", save_words, {"step_token": "@", **WORDS}),
    "pairwise": ("pairwise", save_words, {"opponents": 1}),
}
KINDS: dict[str, tuple[str, Callable[[Path], Path] | None, dict[str, Any]]] = {
    **CAUSAL,
    "cross-encoder": ("cross-encoder", partial(save_cross_encoder, config=CONFIGS["deberta"]), {}),
    "toy": ("toy", None, {}),
    "function": ("function", None, {"function": f"{__name__}:brevity"}),
}


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A kind and its options, the model saved."""

    def spec_of(name: str) -> dict[str, Any]:
        kind, save_model, options = KINDS[name]
        spec: dict[str, Any] = {"kind": kind, **options}
        if save_model:
            spec["directory"] = save_model(tmp_path_factory.mktemp(kind))
        if "reference" in spec:
            spec["reference"] = save_words(tmp_path_factory.mktemp("reference"), seed=7)
        return spec

    return spec_of


@pytest.mark.parametrize("name", KINDS)
def test_growing_texts_in_shared_passes_score_as_from_scratch(
    spec_of: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Guards what is kept between rounds, and passes with nothing to compute."""
    reward = load(**spec_of(name))
    sessions = [reward.open(PROMPT), reward.open(Prompt.from_user("Count."))]
    texts = {0: "", 1: "a", 2: "On"}
    for part in ("e.\n\nMix", " flour é.\n\n", "", "\n"):
        texts = {key: text + part for key, text in texts.items() if key < 2 or part}
        tasks = [session.begin(batch(texts)) for session in sessions]
        while pieces := take_fairly(tasks, 60):
            reward.compute(pieces)
        for task, prompt in zip(tasks, (PROMPT, Prompt.from_user("Count.")), strict=True):
            fresh = reward.open(prompt)
            expected = score_batch(fresh, reward, batch(texts)).values
            assert task.scores().values == pytest.approx(expected, abs=1e-4)
            fresh.close()
    again = score_batch(sessions[0], reward, batch(texts)).values
    assert again == pytest.approx(tasks[0].scores().values, abs=1e-4)
    if hasattr(reward, "scorer"):
        reward.scorer.check_integrity()


@pytest.mark.parametrize("name", KINDS)
async def test_a_worker_serves_every_kind(
    spec_of: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Guards batches without new tokens, and a lone text, which `pairwise` compares with none."""
    worker = await Worker.start(partial(load, **spec_of(name)))
    try:
        assert worker.description.name == "r"
        async with worker.open(PROMPT) as session:
            candidates = batch({0: "One.\n\nTw", 1: ""})
            first = await session.score(candidates)
            again = await session.score(candidates)
            assert again.values == pytest.approx(first.values, abs=1e-4)
            assert len((await session.score(candidates[:1])).values) == 1
    finally:
        worker.close()


@pytest.mark.parametrize("name", CAUSAL)
def test_prompt_over_the_models_limit_is_an_invalid_request(
    spec_of: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Guards against scores of responses to a part of the prompt."""
    with pytest.raises(InvalidRequest) as failure:
        load(**spec_of(name)).open(Prompt.from_user("a" * 1000))
    assert [violation.field for violation in failure.value.violations] == ["prompt"]


@pytest.mark.parametrize("option", ["directory", "head", "adapter", "reference"])
def test_missing_file_is_an_error_with_the_rewards_name(tmp_path: Path, option: str) -> None:
    kind = "likelihood" if option == "reference" else "classifier"
    spec = {"directory": tmp_path, option: tmp_path / "gone"}
    with pytest.raises(FileNotFoundError, match=r"reward r: no .* .*gone"):
        load(kind, **spec)


# A value of the same type that no option has by default.
OTHER: dict[type, Any] = {
    float: 0.7,
    int: 7,
    str: "other",
    type(None): "other",
    tuple: (2.0,),
    dict: {"quantization": "fp8"},
    Transform: Transform(offset=1.0),
}


@pytest.mark.parametrize(
    "spec_class",
    [kind for kind in get_args(get_args(RewardSpec)[0]) if issubclass(kind, LocalSpec)],
)
def test_every_option_is_in_the_fingerprint(tmp_path: Path, spec_class: type[LocalSpec]) -> None:
    """Guards the cache against answers selected with other options."""
    options = {"gate_at": "x"} if "gate_at" in spec_class.model_fields else {}
    spec = spec_class(name="r", directory=tmp_path, **options)
    fingerprints = {spec.fingerprint(Resources()), spec.fingerprint(Resources(device="cuda"))}
    names = spec_class.model_fields.keys() - {"name", "kind", "directory"}
    names -= {"head", "adapter", "reference"}  # their contents are
    for name in names:
        value = getattr(spec, name)
        other = not value if isinstance(value, bool) else OTHER[type(value)]
        changed = spec.model_construct(**{**spec.__dict__, name: other})
        fingerprints.add(changed.fingerprint(Resources()))
    assert len(fingerprints) == 2 + len(names)
    renamed = spec.model_copy(update={"name": "other"})
    assert renamed.fingerprint(Resources()) in fingerprints


def test_code_that_comes_with_a_model_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the machine against the author of a model's directory."""
    plain, custom = tmp_path / "plain", tmp_path / "custom"
    save(plain)
    save(custom)
    config = json.loads((custom / "config.json").read_text())
    config["model_type"] = "own-llama"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (custom / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran.txt"
    (custom / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaModel\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnModel(LlamaModel):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    with pytest.raises((ValueError, OSError)):
        load("classifier", custom)
    assert not marker.exists()
    trusted = load("classifier", custom, trust_remote_code=True)
    assert marker.exists()
    expected = score(load("classifier", plain), PROMPT, ["a", "b"]).values
    assert score(trusted, PROMPT, ["a", "b"]).values == pytest.approx(expected, abs=1e-4)
