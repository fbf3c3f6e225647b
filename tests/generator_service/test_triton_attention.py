"""Decode attention in Triton against attention.py's torch operations.

Interpreted on the CPU, and where there is a GPU, on it; that the kernels compile for one is checked
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference import attention
from inference.attention import DecodeSegment, PrefillSegment, Scaling, Segment
from inference.kv import KVShape, PromptKV, SuffixKV
from tests.generator_service import interpreter

pytest.importorskip("triton")

WAIT_S = 900  # interpreted kernels are slow, and other processes may be in the way
LAYERS = 2
LAYER = 1
UNSET = 3e4  # where nothing is stored; a kernel that reads it is found out


@dataclass(frozen=True)
class Case:
    """One session's step; `padding` rows come after its live ones."""

    pieces: tuple[int, ...] = (70,)
    length: int = 40
    rows: int = 3
    padding: int = 0
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    softcap: float | None = None
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


CASES = {
    "first-token": Case(pieces=(1,), length=0),
    "one-block-exactly": Case(pieces=(32,), length=32),
    "one-more-than-a-block": Case(pieces=(33,), length=33),
    "all-splits": Case(pieces=(300,), length=150, rows=2, kv_heads=1),
    "two-pieces": Case(pieces=(64, 7)),
    "three-pieces": Case(pieces=(65, 1, 130)),
    "one-row": Case(rows=1),
    "padding": Case(padding=2),
    "padding-of-a-whole-block": Case(rows=3, padding=6, group=4),
    "no-groups": Case(group=1, kv_heads=3),
    "groups-of-3": Case(group=3, rows=6),
    "groups-of-8": Case(group=8, kv_heads=1),
    "groups-of-17": Case(group=17, kv_heads=1, rows=2),
    "dim-8": Case(dim=8),
    "dim-64": Case(dim=64, group=3, kv_heads=1),
    "dim-80": Case(dim=80, pieces=(70, 9)),
    "dim-128": Case(dim=128, group=4),
    "window-of-one": Case(window=1),
    "window-on-own-tokens": Case(window=25),
    "window-of-all-own-tokens": Case(window=41),
    "window-into-the-prompt": Case(pieces=(64, 40), window=70),
    "window-beyond-a-piece": Case(pieces=(64, 40), window=110),
    "window-of-more-than-all": Case(window=500),
    "softcap": Case(softcap=3.0),
    "softcap-and-window": Case(softcap=50.0, window=60, dim=64),
    "float16": Case(dtype=torch.float16, dim=64, pieces=(70, 65), length=70),
    "bfloat16": Case(dtype=torch.bfloat16, dim=64, pieces=(70, 65), length=70),
}
# In units of the results, which lie around 0.2; 16 bits round to 3 or 2 decimals.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Executor]:
    with interpreter.process() as process:
        yield process


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_torch_operations(interpreted: Executor, name: str) -> None:
    """What is stored, to the bit and nowhere else, and what comes out."""
    interpreted.submit(compare, CASES[name]).result(WAIT_S)


def test_sessions_and_a_prompt_share_a_pass(interpreted: Executor) -> None:
    """Rows of the right sessions, with the prompt's chunk between them left to torch."""
    interpreted.submit(compare_shared_pass).result(WAIT_S)


def test_a_table_can_point_elsewhere(interpreted: Executor) -> None:
    """A recorded launch is right for whatever its table is filled with, fewer pieces too."""
    interpreted.submit(compare_refilled).result(WAIT_S)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_gpu_equals_torch_operations(name: str) -> None:
    compare(replace(CASES[name], device="cuda"))


def compare(case: Case) -> None:
    """In the interpreter's process, if the case is a CPU's; as all below."""
    from generator_service.triton_attention import Table

    torch.manual_seed(1)
    segment = a_session(case)
    check_step(case, segment, Table.of(segment))


def compare_refilled() -> None:
    from generator_service.triton_attention import Table

    torch.manual_seed(2)
    table = Table(LAYERS, 3, torch.device("cpu"))
    padded = Case(rows=4, padding=2)
    for case in (
        replace(padded, pieces=(5, 70, 3), length=50),
        replace(padded, pieces=(90,), length=3, rows=1, padding=5),
        replace(padded, pieces=(2, 2), length=0, rows=6, padding=0),
    ):
        segment = a_session(case)
        table.fill(segment)
        check_step(case, segment, table)


def compare_shared_pass() -> None:
    from generator_service.triton_attention import decoder

    torch.manual_seed(3)
    sessions = [a_session(Case(pieces=(66, 5))), a_session(Case(rows=2, length=0))]
    prompt = PromptKV(kv_shape(Case()), 9)
    chunk = PrefillSegment((prompt,), 0, 0, 9)
    segments: list[Segment] = [sessions[0], chunk, sessions[1]]
    rows = sum(segment.num_rows for segment in segments)
    qkv = (torch.randn(4, rows, 16), torch.randn(2, rows, 16), torch.randn(2, rows, 16))
    expected, found = (
        attention.attend_rows(LAYER, qkv, segments, Scaling(0.3, None, None), by)
        for by in (None, decoder(segments))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert decoder([chunk]) is None


def check_step(case: Case, segment: DecodeSegment, table: Any) -> None:
    from generator_service.triton_attention import decode

    total, heads = case.rows + case.padding, case.kv_heads * case.group
    # Views of [heads, rows, d], as attention functions get them.
    query = torch.randn(heads, total, case.dim).to(case.device, case.dtype).transpose(0, 1)
    key, value = torch.randn(2, total, case.kv_heads, case.dim).to(case.device, case.dtype)
    output = torch.full_like(query, UNSET, memory_format=torch.contiguous_format)
    before = stored(segment.suffix)
    scaled = Scaling(0.3, case.softcap, case.window)
    decode(query, key, value, output, table, LAYER, scaled)
    found = stored(segment.suffix)
    for tensor, new in zip(before[LAYER], (key, value), strict=True):
        tensor[: case.rows, :, case.length] = new[: case.rows]
    for layer in range(LAYERS):
        for ours, theirs in zip(found[layer], before[layer], strict=True):
            assert torch.equal(ours, theirs)
    # The reference in float32, whatever the kernel computes in.
    expected = attention._decode(widened(segment), LAYER, query[: case.rows].float(), scaled)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(output[: case.rows].float(), expected, atol=tolerance, rtol=0)
    assert not output[case.rows :].any()


def kv_shape(case: Case) -> KVShape:
    return KVShape(LAYERS, case.kv_heads, case.dim, case.dtype, torch.device(case.device))


def a_session(case: Case) -> DecodeSegment:
    """Random keys and values where tokens are, with room for more rows and tokens."""
    shape = kv_shape(case)
    pieces = tuple(PromptKV(shape, tokens) for tokens in case.pieces)
    suffix = SuffixKV(shape, case.rows + case.padding + 1)
    suffix.reserve(case.length + 3)
    suffix.live, suffix.length = case.rows, case.length
    for layer in range(LAYERS):
        for piece in pieces:
            piece.keys[layer].normal_()
            piece.values[layer].normal_()
        for store in (suffix.keys(layer), suffix.values(layer)):
            store.fill_(UNSET)
            store[: case.rows, :, : case.length].normal_()
    return DecodeSegment(pieces, suffix)


def stored(suffix: SuffixKV) -> list[tuple[Tensor, Tensor]]:
    return [(suffix.keys(layer).clone(), suffix.values(layer).clone()) for layer in range(LAYERS)]


def widened(segment: DecodeSegment) -> DecodeSegment:
    """The same session in float32."""
    suffix = segment.suffix
    shape = replace(suffix._shape, dtype=torch.float32)
    pieces = tuple(PromptKV(shape, piece.num_tokens) for piece in segment.pieces)
    for ours, theirs in zip(pieces, segment.pieces, strict=True):
        for layer in range(LAYERS):
            ours.write(layer, 0, theirs.keys[layer].float(), theirs.values[layer].float())
    wide = SuffixKV(shape, suffix.keys(0).shape[0])
    wide.reserve(suffix.tokens_room)
    wide.live, wide.length = suffix.live, suffix.length
    for layer in range(LAYERS):
        wide.keys(layer).copy_(suffix.keys(layer))
        wide.values(layer).copy_(suffix.values(layer))
    return DecodeSegment(pieces, wide)


# Without the interpreter: what the compiler makes for compute capability 9.0, which takes no GPU.

TENSOR_CORES = r"wgmma\.mma_async", r"mma\.sync\.aligned\.m16n8k16"
COPY_16_BYTES = r"cp\.async\.cg\.shared\.global .*, 0x10"


@pytest.mark.parametrize(
    ("case", "uses_tensor_cores"),
    [
        (Case(dim=128, group=4, dtype=torch.bfloat16), True),
        (Case(dim=256, group=2, dtype=torch.float16, softcap=50.0, window=30), True),
        (Case(dim=80, group=3, kv_heads=3, dtype=torch.float32), False),
    ],
)
def test_a_step_compiles_for_hopper(
    case: Case, uses_tensor_cores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter takes the compiler may not; and 16 bytes must travel at a time.

    The stores' addresses come from the table: without a word on their alignment, loads are narrow.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shared, own, merge = compiled(case, monkeypatch)
    for ptx, product in zip((shared, own), TENSOR_CORES, strict=True):
        assert re.search(COPY_16_BYTES, ptx)
        assert bool(re.search(product, ptx)) == uses_tensor_cores
    assert "ld.global.v4" in merge


def compiled(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of a step's kernels, as its launches ask for them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from generator_service.triton_attention import Table, decode

    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    made: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        made.append(run(self, *args, **(options | {"warmup": True})).asm["ptx"])

    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    segment = a_session(case)
    heads = case.kv_heads * case.group
    query = torch.randn(case.rows, heads, case.dim).to(case.dtype)
    key, value = torch.randn(2, case.rows, case.kv_heads, case.dim).to(case.dtype)
    scaled = Scaling(0.3, case.softcap, case.window)
    decode(query, key, value, torch.empty_like(query), Table.of(segment), LAYER, scaled)
    return made
