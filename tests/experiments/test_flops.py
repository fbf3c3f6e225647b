"""Operations against a count, layer by layer and token by token."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments.flops import (
    Sizes,
    decode_flops,
    encoder_flops,
    generator_flops,
    read_sizes,
)
from experiments.replay import Replayed, Setting, replay
from experiments.replay_speed import made_up
from experiments.studies.compute import UNKNOWN, recorded
from specrej.contracts import Schedule

SIZES = Sizes(layers=2, hidden=6, heads=3, kv_heads=1, head_size=4, intermediate=10, vocabulary=20)
KEPT = made_up(12, 32, 1)
PROMPT_TOKENS = KEPT.prompt_tokens


@pytest.fixture
def done() -> Replayed:
    return replay(KEPT, Setting(0, 0.5, Schedule(first=8), "made-up"))


def lengths(done: Replayed) -> list[int]:
    """Tokens written of each candidate, from who survived which round."""
    reached, live = [0] * KEPT.n, range(KEPT.n)
    for each in done.rounds:
        for row in live:
            reached[row] = min(each.decision_token, int(KEPT.num_tokens[row]))
        live = each.survivors  # type: ignore[assignment]
    return reached


def token_flops(num_seen: int, *, with_head: bool) -> int:
    """One token through every matrix, seeing so many tokens."""
    query = output = 2 * 6 * 12
    keys = values = 2 * 6 * 4
    mlp = 3 * 2 * 6 * 10
    attention = 2 * (2 * num_seen * 4) * 3  # scores, then values, of 3 heads of 4
    return 2 * (query + output + keys + values + mlp + attention) + with_head * 2 * 6 * 20


def test_a_replays_counts_are_those_of_its_candidates(done: Replayed) -> None:
    """What the arithmetic stands on: every token once, with the tokens before it."""
    written = lengths(done)
    assert done.generated_tokens == sum(written)
    assert done.attended_tokens == sum(n * (n - 1) // 2 for n in written)


def test_generated_tokens_cost_what_they_cost_one_by_one(done: Replayed) -> None:
    one_by_one = sum(
        token_flops(PROMPT_TOKENS + before, with_head=True)
        for length in lengths(done)
        for before in range(length)
    )
    counts = (done.generated_tokens, done.attended_tokens)
    assert decode_flops(SIZES, PROMPT_TOKENS, *counts) == one_by_one
    prompt = sum(token_flops(seen + 1, with_head=False) for seen in range(PROMPT_TOKENS))
    assert generator_flops(SIZES, PROMPT_TOKENS, done) == prompt + one_by_one


def test_an_encoder_reads_every_prefix_from_its_beginning(done: Replayed) -> None:
    assert encoder_flops(SIZES, done) == read_flops(done, 32)


def test_an_encoder_reads_no_further_than_it_can(done: Replayed) -> None:
    """Guards against paying for text past the 256 tokens that `relevance` reads."""
    assert encoder_flops(replace(SIZES, max_tokens=12), done) == read_flops(done, 12)
    assert read_flops(done, 12) < read_flops(done, 32)


def read_flops(done: Replayed, most: int) -> int:
    """Of every prefix that was judged, up to `most` tokens of each."""
    expected, live = 0, list(range(KEPT.n))
    for each in done.rounds:
        for row in live:
            length = min(each.decision_token, int(KEPT.num_tokens[row]), most)
            expected += length * token_flops(length, with_head=False)
        live = list(each.survivors)
    return expected


def test_sizes_are_read_from_a_models_configuration(tmp_path: Path) -> None:
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
    # Guards against counting one expert of many, or a gate that is not there.
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    assert read_sizes(tmp_path, with_head=True) is None


def test_a_collection_tells_whose_flops_they_are() -> None:
    sizes = {"generator": asdict(SIZES), "reward relevance": asdict(replace(SIZES, max_tokens=256))}
    head = {"identity": {"model": "tiny"}, "sizes": sizes}
    own = recorded(head, "likelihood")
    assert (own.name, own.generator, own.encoder) == ("tiny", SIZES, None)
    judged = recorded(head, "relevance")
    assert judged.name == "tiny, judged by relevance"
    assert judged.encoder == replace(SIZES, max_tokens=256)
    # Guards against a reward whose reading is free because nobody knows what it costs.
    assert recorded(head, "another") is UNKNOWN
    assert recorded({"identity": {"model": "tiny"}}, "likelihood") is UNKNOWN
