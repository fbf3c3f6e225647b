"""Checkpoints as users have them: each loads as it should, or is refused with one sentence."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from generator_service.engine.model import CausalLM
from generator_service.engine.text import Text
from specrej.contracts import Prompt
from specrej.contracts.errors import InvalidRequest
from specrej_models.probe import Examined, examine
from tests.reward_service import tiny
from tests.reward_service.tiny import load

Change = Callable[[Path], object]
SERVICES = ("generator", "reward")
EACH = "{% for m in messages %}"
PLAIN = EACH + "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
CHECKED = EACH + "{% if CONDITION %}{{ raise_exception('REASON') }}{% endif %}" + PLAIN[len(EACH) :]
ALTERNATING = CHECKED.replace("CONDITION", "(m.role == 'user') != (loop.index0 % 2 == 0)").replace(
    "REASON", "must alternate"
)
NO_SYSTEM = CHECKED.replace("CONDITION", "m.role == 'system'").replace("REASON", "no system")
ENDED = "{{ '<end>' if m.role == 'assistant' }}"
ONE_TURN = "{{ messages[-2].content if messages[-1].role == 'assistant' }}"
ONE_TURN += "{{ messages[-1].content }}</s>"
FOLDED = "{% set s = messages[0].content if messages[0].role == 'system' %}"
FOLDED += EACH + "{% if m.role != 'system' %}{{ s if loop.last }}{{ m.content }}</s>"
FOLDED += "{% endif %}{% endfor %}"
PARTS = EACH + "<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
NORM, GATE, EMBEDDING = (
    "model.norm.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.embed_tokens.weight",
)


def config(**values: Any) -> Change:
    return edited("config.json", values)


def edited(file: str, values: Mapping[str, Any]) -> Change:
    def change(directory: Path) -> None:
        path = directory / file
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **values}))

    return change


def template(text: Any) -> Change:
    def change(directory: Path) -> None:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        edited("tokenizer_config.json", {"chat_template": text})(directory)

    return change


def tensors(change_all: Callable[[dict[str, Any]], object]) -> Change:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        weights = load_file(path)
        change_all(weights)
        save_file(weights, path, {"format": "pt"})

    return change


def tensor(name: str, value: Callable[[Any], Any]) -> Change:
    return tensors(lambda weights: weights.update({name: value(weights.get(name))}))


def file(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def truncated(name: str) -> Change:
    return lambda directory: os.truncate(directory / name, 900)


def quantized(method: str) -> Change:
    return config(quantization_config={"quant_method": method, "bits": 4})


def all_of(*changes: Change) -> Change:
    return lambda directory: [change(directory) for change in changes]


def float8(weight: Any) -> Any:
    return weight.to(torch.float8_e4m3fn)


def not_a_number(weight: Any) -> Any:
    weight[-1, 0] = float("nan")
    return weight


def sharded(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    shards = {NORM: "model-00001-of-00002.safetensors", GATE: "model-00002-of-00002.safetensors"}
    edited("model.safetensors.index.json", {"weight_map": shards})(directory)


def added(*texts: str) -> Change:
    """Tokens after the last of the model's vocabulary."""

    def change(directory: Path) -> None:
        tokenizer = tiny.make_tokenizer(None)
        tokenizer.add_tokens([AddedToken(text, special=True) for text in texts])
        tokenizer.save_pretrained(directory)

    return change


NO_ENDS = all_of(
    config(eos_token_id=None),
    edited("generation_config.json", {"eos_token_id": None}),
    edited("tokenizer_config.json", {"eos_token": None}),
    lambda directory: (directory / "special_tokens_map.json").unlink(missing_ok=True),
)

# The change of a checkpoint, and a part of the sentence that refuses it.
REFUSED: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (tensors(lambda w: w.pop(NORM)), rf"lacks (model\.)?{NORM[6:]}"),
    "a tensor is left over": (
        tensor("model.adapter.weight", lambda _: torch.ones(2)),
        "does not use: .*adapter",
    ),
    "a tensor has another size": (
        tensor(NORM, lambda w: w[:7].clone()),
        r"norm\.weight \(7 in place of 32\)",
    ),
    "float8 without a method": (
        tensor(GATE, float8),
        "type F8_E4M3, and no quantization_config .*gate",
    ),
    "int8 without a method": (tensor(GATE, lambda w: w.to(torch.int8)), "type I8, and no quant"),
    "ModelOpt FP8": (
        all_of(tensor(GATE, float8), file("hf_quant_config.json", "{}")),
        "quantized by modelopt, which is not supported",
    ),
    "bitsandbytes": (quantized("bitsandbytes"), "quantized by bitsandbytes"),
    "AWQ": (quantized("awq"), "quantized by awq"),
    "compressed-tensors": (quantized("compressed-tensors"), "quantized by compressed-tensors"),
    "a weight is NaN": (tensor(GATE, not_a_number), "not finite"),
    "an embedding is NaN": (tensor(EMBEDDING, not_a_number), "not finite"),
    "a shard is missing": (sharded, "lacks model-00001-of-00002"),
    "pickled weights alone": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "has no model.safetensors",
    ),
    "weights of Git LFS": (
        file("model.safetensors", POINTER),
        "safetensors: is a pointer of Git LFS",
    ),
    "a tokenizer of Git LFS": (file("tokenizer.json", POINTER), "tokenizer.json: is a pointer"),
    "truncated weights": (truncated("model.safetensors"), "model.safetensors cannot be loaded: "),
    "a truncated tokenizer": (truncated("tokenizer.json"), "its tokenizer cannot be loaded: "),
    "no tokenizer": (
        lambda d: (d / "tokenizer.json").rename(d / "other.json"),
        "its tokenizer cannot be loaded: ",
    ),
    "a config that is not JSON": (file("config.json", "{"), "its config cannot be loaded: "),
    "an unknown model": (
        config(model_type="brand-new"),
        "its config cannot be loaded: .*brand-new",
    ),
    "an unknown rope type": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}),
        "cannot be loaded: KeyError: 'spiral'",
    ),
    "a template that drops the user's turn": (
        template("<user>{{ eos_token }}"),
        "leaves out a user turn",
    ),
    "a template with an error": (template("{{ messages[ }}"), "chat template refuses them: "),
    "a template that raises TypeError": (template("{{ 1 + 'a' }}"), "refuses them: TypeError: "),
    "a template with a token beyond the embedding": (
        all_of(added("<tool>"), template(PLAIN + "<tool>")),
        "the chat template writes <tool>, token 259, beyond the model's vocabulary of 259",
    ),
    "an end of turn beyond the embedding": (
        all_of(added("<end>"), template(PLAIN.replace("{{ eos_token }}", ENDED))),
        "the chat template writes <end>, token 259, beyond the model's vocabulary of 259",
    ),
    "a tokenizer of another model": (
        all_of(config(vocab_size=100), tensor(EMBEDDING, lambda w: w[:100].clone())),
        "the tokenizer has tokens beyond the model's vocabulary of 100: ",
    ),
}


@dataclass(frozen=True)
class Fact:
    """What is found out about a generator's checkpoint."""

    change: Change
    end_ids: frozenset[int] = frozenset({2})
    warning: str = ""  # a part of the only one; empty: there is none
    takes_system: bool | None = None


ACCEPTED: dict[str, Fact] = {
    "end tokens of both configs": Fact(
        all_of(config(eos_token_id=0), edited("generation_config.json", {"eos_token_id": [7]})),
        frozenset({0, 2, 7}),
    ),
    "end tokens that do not exist": Fact(
        config(eos_token_id=[-1, 2, 10**6]), warning="the vocabulary lacks are ignored: -1, 1000000"
    ),
    "an end token of the template alone": Fact(
        all_of(NO_ENDS, template(PLAIN.replace("{{ eos_token }}", "<s>"))), frozenset({1})
    ),
    "an end token of the config alone": Fact(
        template(PLAIN.replace("{{ eos_token }}", "\n")), warning="without an end token"
    ),
    "content parts": Fact(template(PARTS)),
    "named templates": Fact(
        template([{"name": "rag", "template": "x"}, {"name": "default", "template": PLAIN}])
    ),
    "no template": Fact(template(None)),
    "system turns": Fact(template(PLAIN), takes_system=True),
    "no system turns": Fact(template(NO_SYSTEM), takes_system=False),
    "strict alternation": Fact(template(ALTERNATING)),
    "the last turn first": Fact(
        template("{% for m in messages[::-1] %}" + PLAIN[len(EACH) :]),
        warning="changes the order of turns",
        takes_system=True,
    ),
    "a system turn in the last user's": Fact(template(FOLDED), takes_system=True),
    "one turn": Fact(template(ONE_TURN), warning="one user turn only"),
    "added tokens beyond the embedding": Fact(
        added("<tool>"),
        warning="text in prompts: tokens beyond the model's vocabulary of 259: <tool>",
    ),
    "a tied head that is stored, too": Fact(
        all_of(
            config(tie_word_embeddings=True),
            tensors(lambda w: w.update({"lm_head.weight": w[EMBEDDING].clone()})),
        )
    ),
    "buffers of old checkpoints": Fact(
        tensor("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: torch.ones(4))
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint for each service."""
    generator, reward = (tmp_path_factory.mktemp(name) for name in SERVICES)
    return {"generator": tiny.save_language_model(generator), "reward": tiny.save(reward)}


def loaded(service: str, directory: Path) -> Examined | None:
    if service == "reward":
        load("classifier", directory)
        return None
    examined = examine(directory)
    CausalLM.load(examined, "cpu")
    return examined


def changed(saved: Path, directory: Path, change: Change) -> Path:
    shutil.copytree(saved, directory, dirs_exist_ok=True)
    change(directory)
    return directory


# Rewards are loaded by the same functions: those that they might not call.
OF_REWARDS = ("a tensor is missing", "a tensor is left over", "a weight is NaN", "AWQ")


@pytest.mark.parametrize(
    ("service", "name"),
    [*(("generator", name) for name in REFUSED), *(("reward", name) for name in OF_REWARDS)],
)
def test_a_checkpoint_that_cannot_work_is_refused(
    saved: dict[str, Path], tmp_path: Path, service: str, name: str
) -> None:
    """Guards against other tokens and other scores without a word, and tracebacks."""
    change, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence) as failure:
        loaded(service, changed(saved[service], tmp_path, change))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_found_out(saved: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Guards against answers that never end, turns that are dropped, and refusals of checkpoints
    that work."""
    fact = ACCEPTED[name]
    examined = loaded("generator", changed(saved["generator"], tmp_path, fact.change))
    assert examined
    assert examined.end_ids == fact.end_ids
    warnings, written = examined.warnings, examined.template
    assert len(warnings) == bool(fact.warning) and fact.warning in "".join(warnings)
    assert fact.takes_system in (None, written and written.takes_system)


def test_a_file_that_may_not_be_read(saved: dict[str, Path]) -> None:
    """Guards against a traceback, and a model without the file."""
    with tempfile.TemporaryDirectory() as parent:
        directory = changed(saved["generator"], Path(parent, "model"), lambda _: None)
        for path in (Path(parent), directory, *directory.iterdir()):
            path.chmod(0o755)
        (directory / "tokenizer.json").chmod(0)
        with as_nobody(), pytest.raises(PermissionError, match=r"denied: .*tokenizer\.json"):
            examine(directory)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read all files."""
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_turns_are_written_as_the_template_takes_them(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    """Guards against the letters of a text as its content parts, an added token that the model does
    not have, and one that a template drops without a word."""
    directory = changed(saved["generator"], tmp_path, all_of(added("<tool>"), template(PARTS)))
    examined = examine(directory)
    text = Text.of(examined)
    ids = text.encode(Prompt.from_user("a <tool>"))
    assert examined.tokenizer.decode(ids) == "<user>a <tool></s>"
    assert max(ids) < examined.vocabulary
    with pytest.raises(InvalidRequest, match=r"prompt\.text: the model has no token <tool>"):
        text.encode(Prompt(text="<tool>", allow_special_tokens=True))


def test_the_embedded_model_ends_where_its_template_does(tmp_path: Path) -> None:
    """Guards against answers that go on to max_tokens: both configs name a token that the model
    never writes."""
    for path in Path(".models/SmolLM2-135M-Instruct").resolve().iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
        else:
            (tmp_path / path.name).symlink_to(path)
    for name in ("config.json", "generation_config.json"):
        edited(name, {"eos_token_id": 0})(tmp_path)
    examined = examine(tmp_path)
    ends = examined.tokenizer.convert_ids_to_tokens(sorted(examined.end_ids))
    assert ends == ["<|endoftext|>", "<|im_end|>"]
