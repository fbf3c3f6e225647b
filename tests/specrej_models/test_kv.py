"""The tensors behind the slots: what they hold, and the memory they take, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from specrej_models.kv import KVShape, PromptKV, SuffixKV

S = TypeVar("S")

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes above those at the start: the most at any moment, and those that stay."""

    peak: int
    stays: int


def allocated(action: Callable[[S], object], before: Callable[[], S]) -> Allocated:
    """What `action` on the result of `before` allocates and frees, by torch's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = before()  # within the profile: only what it has seen coming does it see going
        with record_function("measured"):
            kept = action(state)
    del state, kept
    assert profiler.profiler and profiler.profiler.kineto_results
    events: list[Any] = sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    )
    start, *_ = (event.start_ns() for event in events if event.name() == "measured")
    memory = [event for event in events if event.name() == "[memory]"]
    now = sum(event.nbytes() for event in memory if event.start_ns() < start)
    steady = peak = now
    for event in memory:
        if event.start_ns() >= start:
            now += event.nbytes()
            peak = max(peak, now)
    return Allocated(peak - steady, now - steady)


def nothing() -> None:
    """There was nothing before."""


def shape_of(
    layers: int = 8, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> KVShape:
    return KVShape(layers, kv_heads, head_dim, dtype, CPU)


@pytest.mark.parametrize(
    "shape", [shape_of(1, 1, 1), shape_of(30, 3, 64), shape_of(5, 8, 128, torch.bfloat16)], ids=str
)
def test_stores_take_their_slots_in_bytes(shape: KVShape) -> None:
    """Capacity is bytes divided by this: a forgotten factor is memory that runs out."""

    def reserved() -> SuffixKV:
        suffix = SuffixKV(shape, 7)
        suffix.reserve(13)
        return suffix

    memory = allocated(lambda _: PromptKV(shape, 17), nothing)
    assert memory.stays == memory.peak == PromptKV(shape, 17).num_bytes == 17 * shape.slot_bytes
    assert allocated(lambda _: reserved(), nothing).stays == 7 * 13 * shape.slot_bytes
    assert reserved().num_bytes == 7 * 13 * shape.slot_bytes


def written(shape: KVShape, num_tokens: int) -> tuple[PromptKV, list[Tensor], list[Tensor]]:
    """A prompt, and its keys and values per layer."""
    prompt = PromptKV(shape, num_tokens)
    generator = torch.Generator().manual_seed(1)
    size = (shape.layers, shape.kv_heads, num_tokens, shape.head_dim)
    keys, values = torch.randn(2, *size, generator=generator).unbind()
    for layer in range(shape.layers):
        prompt.write(layer, 0, keys[layer], values[layer])
    return prompt, [*keys], [*values]


def is_whole(prompt: PromptKV, keys: list[Tensor], values: list[Tensor]) -> bool:
    """Whether these are all of its keys and values."""
    pairs = [*zip(prompt.keys, keys, strict=True), *zip(prompt.values, values, strict=True)]
    return all(torch.equal(memory, expected) for memory, expected in pairs)


def test_a_split_prompt_holds_what_it_held() -> None:
    """Both parts, in stores of their own: neither may keep the other's memory."""
    prompt, keys, values = written(shape_of(), 10)
    front, rest = prompt.split(3)
    assert is_whole(front, [k[:, :3] for k in keys], [v[:, :3] for v in values])
    assert is_whole(rest, [k[:, 3:] for k in keys], [v[:, 3:] for v in values])
    assert (front.num_tokens, rest.num_tokens) == (3, 7)
    for part in (front, rest):
        tensors = [*part.keys, *part.values]
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == part.num_bytes


def test_a_split_takes_one_layer_more() -> None:
    """A prompt that fills the memory can be split all the same."""
    shape = shape_of()
    memory = allocated(lambda prompt: prompt.split(400), lambda: PromptKV(shape, 1000))
    assert memory.peak <= 1000 * shape.slot_bytes // shape.layers
    assert memory.stays == 0


def test_a_split_without_memory_shares_what_it_cannot_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards sessions on a prompt that another one splits when the memory has run out."""
    prompt, keys, values = written(shape_of(), 10)
    copies, clone = iter(range(7)), Tensor.clone

    def scarce(tensor: Tensor) -> Tensor:
        if next(copies, None) is None:
            raise RuntimeError("out of memory")
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", scarce)
    front, rest = prompt.split(3)
    assert is_whole(front, [k[:, :3] for k in keys], [v[:, :3] for v in values])
    assert is_whole(rest, [k[:, 3:] for k in keys], [v[:, 3:] for v in values])


def grown(shape: KVShape, rows: int, tokens: int, live: int | None = None) -> SuffixKV:
    """A store of that many tokens per row, all room used, cut down to `live` rows."""
    suffix = SuffixKV(shape, rows)
    suffix.reserve(tokens)
    suffix.length = tokens
    suffix.keep(range(rows if live is None else live), rows * tokens)
    return suffix


def views(suffix: SuffixKV) -> list[Tensor]:
    """Keys and values of all layers."""
    return [view for n in range(8) for view in (suffix.keys(n), suffix.values(n))]


SLACK = 4096  # indices of rows and the like
Move = Callable[[SuffixKV], None]


@pytest.mark.parametrize(
    ("move", "live", "more_slots", "layer_slots"),
    [
        (lambda suffix: suffix.keep(range(0, 64, 2), 6400), 64, 0, 32 * 100),
        (lambda suffix: suffix.shrink(32 * 100), 32, -32 * 100, 32 * 100),
        (lambda suffix: suffix.reserve(200), 64, 64 * 100, 64 * 100),
        (lambda suffix: suffix.reserve(400), 16, 0, 64 * 100),
    ],
    ids=["keep half", "shrink", "grow", "grow in place"],
)
def test_a_move_takes_one_layer_more_than_what_stays(
    move: Move, live: int, more_slots: int, layer_slots: int
) -> None:
    """Guards against all layers at once, or a copy of the whole store: its memory twice."""
    shape = shape_of()
    memory = allocated(move, lambda: grown(shape, 64, 100, live=live))
    assert memory.stays == more_slots * shape.slot_bytes
    layer_bytes = layer_slots * shape.slot_bytes // shape.layers // 2  # of keys, or of values
    assert memory.peak <= max(0, memory.stays) + layer_bytes + SLACK


@pytest.mark.parametrize(
    "rows", [[0, 2, 2, 2], [3, 1, 3, 0, 1, 1, 1, 2, 0, 3], [1] * 40], ids=["few", "more", "many"]
)
def test_a_repeated_row_is_copied(rows: list[int]) -> None:
    """A fork has its parent's keys and values, also where the store has too few rows."""
    shape = shape_of()
    suffix = grown(shape, 4, 10)
    suffix.length = 6
    stored = [view[:4, :, :6].normal_().clone() for view in views(suffix)]
    suffix.keep(rows, 1000)
    suffix.reserve(11)
    assert (suffix.live, suffix.length) == (len(rows), 6)
    for view, before in zip(views(suffix), stored, strict=True):
        assert torch.equal(view[: len(rows), :, :6], before[rows])


def test_forks_stay_within_their_slots() -> None:
    """Guards against the room of few long rows that each of many gets: nearly twice the share."""
    shape = shape_of()
    suffix = grown(shape, 2, 80)
    suffix.length = 44
    stored = suffix.keys(0)[:2, :, :44].normal_().clone()
    suffix.keep([0] * 20 + [1], 1000)
    assert suffix.num_bytes <= 1000 * shape.slot_bytes
    assert torch.equal(suffix.keys(0)[[0, 19, 20], :, :44], stored[[0, 0, 1]])


def test_rows_without_tokens_are_forked() -> None:
    """After the first token, drawn from the prompt's logits, no row has stored one."""
    suffix = SuffixKV(shape_of(), 1)
    suffix.keep([0, 0], 0)
    suffix.reserve(1)
    assert (suffix.live, suffix.length, len(suffix.keys(0))) == (2, 0, 2)


@pytest.mark.parametrize(("row", "left"), [(0, [3, 1, 2]), (1, [0, 3, 2]), (3, [0, 1, 2])])
def test_the_last_row_takes_the_place_of_a_dropped_one(row: int, left: list[int]) -> None:
    suffix = grown(shape_of(), 4, 10)
    suffix.length = 6
    stored = [view.normal_().clone() for view in views(suffix)]
    suffix.drop(row)
    assert suffix.live == 3
    for view, before in zip(views(suffix), stored, strict=True):
        assert torch.equal(view[:3, :, :6], before[left, :, :6])
