"""FLOPs compared with a count layer by layer and token by token."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments.flops import (
    UNKNOWN,
    Sizes,
    decode_flops,
    encoder_flops,
    generator_flops,
    read_sizes,
    recorded,
)
from experiments.replay import Replayed, Replayer, Setting
from specrej.contracts import Schedule
from tests.experiments.synthetic import WALK, trajectories

SIZES = Sizes(layers=2, hidden=6, heads=3, kv_heads=1, head_size=4, intermediate=10, vocabulary=20)
PROMPT = trajectories(12, 32, (8, 16, 32), stop_share=0.4, seed=1)
PROMPT_TOKENS = PROMPT.prompt_tokens


@pytest.fixture
def done() -> Replayed:
    return Replayer(PROMPT, WALK).run(Setting(0, 0.5, Schedule(first=8), WALK))


def lengths(done: Replayed) -> list[int]:
    """Generated tokens of each candidate, from the survivors of each round."""
    reached, live = [0] * PROMPT.n, range(PROMPT.n)
    for cut in done.rounds:
        for row in live:
            reached[row] = min(cut.decision_token, int(PROMPT.num_tokens[row]))
        live = cut.survivors  # type: ignore[assignment]
    return reached


def token_flops(num_seen: int, *, with_head: bool) -> int:
    """One token through every matrix, attending to `num_seen` tokens."""
    query = output = 2 * 6 * 12
    keys = values = 2 * 6 * 4
    mlp = 3 * 2 * 6 * 10
    attention = 2 * (2 * num_seen * 4) * 3  # scores, then values, of 3 heads of 4
    return 2 * (query + output + keys + values + mlp + attention) + with_head * 2 * 6 * 20


def test_replay_counts_every_token_with_the_tokens_before_it(done: Replayed) -> None:
    written = lengths(done)
    assert done.generated_tokens == sum(written)
    assert done.attended_tokens == sum(n * (n - 1) // 2 for n in written)


def test_decode_flops_equal_the_sum_over_tokens(done: Replayed) -> None:
    """The prompt's pass yields the first token of each candidate; the last one is not read."""
    one_by_one = sum(
        token_flops(PROMPT_TOKENS + read, with_head=True)
        for length in lengths(done)
        for read in range(1, length)
    )
    assert decode_flops(SIZES, PROMPT_TOKENS, done) == one_by_one
    prompt = sum(
        token_flops(seen, with_head=seen == PROMPT_TOKENS) for seen in range(1, PROMPT_TOKENS + 1)
    )
    assert generator_flops(SIZES, PROMPT_TOKENS, done) == prompt + one_by_one


def test_encoder_reads_every_prefix_up_to_max_tokens(done: Replayed) -> None:
    """Guards against counting text past the 256 tokens that `relevance` reads."""
    assert encoder_flops(SIZES, done) == read_flops(done, 32)
    assert encoder_flops(replace(SIZES, max_tokens=12), done) == read_flops(done, 12)
    assert read_flops(done, 12) < read_flops(done, 32)


def read_flops(done: Replayed, most: int) -> int:
    """Of every prefix that was scored, up to `most` tokens of each."""
    expected, live = 0, list(range(PROMPT.n))
    for cut in done.rounds:
        for row in live:
            length = min(cut.decision_token, int(PROMPT.num_tokens[row]), most)
            expected += length * token_flops(length, with_head=False)
        live = list(cut.survivors)
    return expected


def test_sizes_are_read_from_config_json(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3,
        "num_key_value_heads": 1, "intermediate_size": 10, "vocab_size": 20, "model_type": "llama",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_sizes(tmp_path, with_head=True) == Sizes(2, 12, 3, 1, 4, 10, 3, 20)
    encoder = {name: value for name, value in config.items() if name != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(encoder | {"model_type": "bert"}))
    expected = Sizes(2, 12, 3, 3, 4, 10, 2, 0, max_tokens=256)
    assert read_sizes(tmp_path, with_head=False, max_tokens=256) == expected
    # Guards against unsupported layouts: a mixture of experts uses a part of its weights.
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    assert read_sizes(tmp_path, with_head=True) is None


def test_recorded_models_need_all_sizes() -> None:
    sizes = {"generator": asdict(SIZES), "reward relevance": asdict(replace(SIZES, max_tokens=256))}
    head = {"identity": {"model": "tiny"}, "sizes": sizes}
    own = recorded(head, "likelihood")
    assert (own.name, own.generator, own.encoder) == ("tiny", SIZES, None)
    scored = recorded(head, "relevance")
    assert scored.name == "tiny, scored by relevance"
    assert scored.encoder == replace(SIZES, max_tokens=256)
    # Guards against a reward of unknown cost that is counted as free.
    assert recorded(head, "another") is UNKNOWN
    assert recorded({"identity": {"model": "tiny"}}, "likelihood") is UNKNOWN
