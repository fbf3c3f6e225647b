"""The tables of attention's jobs, filled in from the segments of one forward pass.

One compiled call per layer computes all rows of all sessions. The tables of all layers are made at
once and differ in addresses only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specrej_models.attention import DecodeSegment, PrefillSegment, Scaling, Segment
from specrej_models.cpu.jobs import BARRIER, layout
from specrej_models.cpu.tiles import LANES, PANEL
from specrej_models.kv import KVShape, PromptKV

# A job: addresses, bytes between rows and between heads, sizes. `stores`: as `shares`, of what is
# done before the barrier; `longest`: the most tokens that a row sees; `num_shares`: what threads
# share.
ATTENTION = layout(
    "shares stores barrier query query_row query_head key key_row key_head value value_row"
    " value_head output heads kv_heads dim segments num_segments parts num_parts longest"
    " num_shares",
    "scale softcap",
)

# Rows of one session, or consecutive tokens of a prompt. Their shares are numbered from
# `first_share` on: `blocks` of `block_rows` rows for each head of keys. They see the first `before`
# tokens of their parts, and either each other (`is_prompt`, within `window` tokens, 0: all) or
# `own` tokens of their own, the new one included. `store_row`, `store_head`: bytes from a row, a
# head to the next one in their store. `new_key` is 0 where the keys are stored already.
SEGMENT = layout(
    "first_share blocks block_rows row rows first_part num_parts before is_prompt window"
    " own own_keys own_values new_key new_value store_row store_head"
)

# Neighbouring tokens that all rows of a segment see.
PART = layout("tokens keys key_row key_head values value_row value_head")

QKV = tuple[Tensor, Tensor, Tensor]
Table = NDArray[Any]


def supports(shape: KVShape, heads: int) -> bool:
    """Whether compiled attention serves heads of this size and number."""
    return shape.head_dim % LANES == 0 and heads // shape.kv_heads <= PANEL


def num_blocks(rows: int, group: int) -> int:
    """Shares of a segment's rows per head of keys: at most PANEL columns each, and at least four
    for the threads to share where that fills vectors."""
    columns = rows * group
    return max(-(-rows // (PANEL // group)), min(-(-columns // LANES), 4))


class CPUAttention:
    """Attention of one forward pass, an `attention.Decoder`; made anew for each."""

    def __init__(self, shape: KVShape, heads: int, segments: Sequence[Segment]) -> None:
        """`supports(shape, heads)` must hold."""
        self._shape = shape
        self._heads = heads
        self._segments: list[tuple[int, Segment]] = []  # with their first rows
        start = 0
        for segment in segments:
            self._segments.append((start, segment))
            start += segment.num_rows
        # Prompts first: their shares are the largest.
        self._segments.sort(key=lambda pair: isinstance(pair[1], DecodeSegment))
        self._tables: dict[Scaling, _Tables] = {}

    def attend(self, layer: int, qkv: QKV, output: Tensor, scaled: Scaling) -> None:
        """Store the rows' keys and values, write their attention to `output` [R, heads, d].

        qkv: [heads, R, d], [kv_heads, R, d], [kv_heads, R, d]; any strides but the last.
        """
        from specrej_models.cpu.attention import attention

        job = self.jobs([layer], qkv, output, scaled)
        work = 2 * int(job["longest"][0]) * output.numel()
        attention.run(job.view(np.int64), work)

    def jobs(self, layers: Sequence[int], qkv: QKV, output: Tensor, scaled: Scaling) -> Table:
        """The attention's jobs of these layers, `ATTENTION` records; valid until the next call."""
        shape = self._shape
        tables = self._tables.get(scaled)
        if tables is None:
            tables = _Tables(self._segments, shape, self._heads // shape.kv_heads, scaled)
            self._tables[scaled] = tables
        jobs = np.zeros(len(layers), ATTENTION)
        jobs["barrier"] = BARRIER
        for name, tensor in zip(("query", "key", "value"), qkv, strict=True):
            head, row, last = tensor.stride()
            assert last == 1
            jobs[name] = tensor.data_ptr()
            jobs[f"{name}_row"], jobs[f"{name}_head"] = 4 * row, 4 * head
        jobs["output"], jobs["heads"], jobs["kv_heads"] = (
            output.data_ptr(),
            self._heads,
            shape.kv_heads,
        )
        jobs["dim"], jobs["longest"], jobs["num_shares"] = (
            shape.head_dim,
            tables.longest,
            tables.shares,
        )
        jobs["scale"], jobs["softcap"] = scaled.scale, scaled.softcap or 0.0
        for name, table in (("segments", tables.segments), ("parts", tables.parts)):
            jobs[name] = table.ctypes.data + table.strides[0] * np.asarray(layers)
            jobs[f"num_{name}"] = table.shape[1]
        return jobs


class _Tables:
    """Segments and parts of all layers, [layers, number]."""

    def __init__(
        self,
        segments: Sequence[tuple[int, Segment]],
        shape: KVShape,
        group: int,
        scaled: Scaling,
    ) -> None:
        self._shape = shape
        self._parts: list[Table] = []
        self.longest = self.shares = 0
        self.segments = np.zeros((shape.layers, len(segments)), SEGMENT)
        for number, (start, segment) in enumerate(segments):
            record = self.segments[:, number]
            blocks = num_blocks(segment.num_rows, group)
            record["first_share"], record["blocks"] = self.shares, blocks
            record["block_rows"] = -(-segment.num_rows // blocks)
            record["row"], record["rows"] = start, segment.num_rows
            self.shares += blocks * shape.kv_heads
            record["first_part"] = len(self._parts)
            if isinstance(segment, PrefillSegment):
                seen = self._fill_prompt(record, segment, scaled.window or 0)
            else:
                seen = self._fill_rows(record, segment, scaled.window)
            record["num_parts"] = len(self._parts) - record["first_part"]
            self.longest = max(self.longest, seen)
        self.parts = np.zeros((shape.layers, len(self._parts)), PART)
        for number, part in enumerate(self._parts):
            self.parts[:, number] = part

    def _fill_prompt(self, record: Table, segment: PrefillSegment, window: int) -> int:
        """Tokens that the last row may see."""
        first = max(0, segment.start + 1 - window) if window else 0
        *earlier, own = segment.pieces
        counts = [*(piece.num_tokens for piece in earlier), segment.offset + segment.num_rows]
        self._add_parts(segment.pieces, counts, first)
        record["before"], record["is_prompt"], record["window"] = segment.start - first, 1, window
        if not segment.stored:
            offset = 4 * segment.offset * self._shape.head_dim
            record["new_key"] = [key.data_ptr() + offset for key in own.keys]
            record["new_value"] = [value.data_ptr() + offset for value in own.values]
            record["store_row"] = 4 * self._shape.head_dim
            record["store_head"] = 4 * own.keys[0].stride(0)
        return segment.start - first + segment.num_rows

    def _fill_rows(self, record: Table, segment: DecodeSegment, window: int | None) -> int:
        """Tokens that a row sees, its own included."""
        pieces, first_own = segment.seen(window)
        suffix, token = segment.suffix, 4 * self._shape.head_dim
        ends = [piece.num_tokens for piece, _ in pieces]
        self._add_parts([piece for piece, _ in pieces], ends, pieces[0][1] if pieces else 0)
        before = sum(ends) - (pieces[0][1] if pieces else 0)
        own = suffix.length + 1 - first_own
        record["before"], record["own"] = before, own
        for name, addresses in (
            ("key", suffix.key_addresses()),
            ("value", suffix.value_addresses()),
        ):
            store = np.array(addresses)
            record[f"own_{name}s"] = store + first_own * token
            record[f"new_{name}"] = store + suffix.length * token
        record["store_head"] = suffix.tokens_room * token
        record["store_row"] = suffix.tokens_room * token * self._shape.kv_heads
        return int(before + own)

    def _add_parts(self, pieces: Sequence[PromptKV], counts: Sequence[int], first: int) -> None:
        """The first `counts` tokens of the pieces, without the `first` of all of them."""
        token = 4 * self._shape.head_dim
        for piece, count in zip(pieces, counts, strict=True):
            if first < count:
                part = np.zeros(self._shape.layers, PART)
                part["tokens"] = count - first
                part["keys"] = [key.data_ptr() + first * token for key in piece.keys]
                part["values"] = [value.data_ptr() + first * token for value in piece.values]
                part["key_row"] = part["value_row"] = token
                part["key_head"] = part["value_head"] = 4 * piece.keys[0].stride(0)
                self._parts.append(part)
            first = max(0, first - count)
