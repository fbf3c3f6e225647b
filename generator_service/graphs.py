"""Decode steps as CUDA graphs: a step is recorded once and then launched as a whole.

With few rows, a GPU's decode step is mostly the launching of a thousand small kernels. Recordings
are made for some numbers of rows, and batches shrink through these as candidates are rejected. All
that differs between steps lies in static buffers, addresses in a table of triton_attention; hence a
recording serves every session. Steps of several sessions, or with a prompt's chunk, run as ever.

Knows nothing of sessions or sampling. Recording itself has not run on a GPU yet: on a CPU, tests
call a step again where a GPU would replay it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from generator_service import triton_attention
from generator_service.model import CausalLM
from generator_service.triton_attention import Table, TritonDecoder
from inference.attention import DecodeSegment, Segment
from inference.kv import KVShape

log = logging.getLogger(__name__)

# Of token ids and positions [rows], each, to logits [rows, vocabulary].
Step = Callable[[Tensor, Tensor, TritonDecoder], Tensor]

# Runs what it is given, and returns what runs it again on whatever its tensors hold then.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]

_MOST_PIECES = 16
_WARM_UPS = 2

# Above this, rows that are there for nothing cost time: buckets lie closer.
_FINE_FROM = 32


class CannotRecord(Exception):
    """The model does in a step what cannot be recorded, such as to wait for the device."""


class GraphedLM(CausalLM):
    """A CausalLM for a GPU: decode attention in Triton, and recorded where one session steps."""

    def __init__(
        self, model: PreTrainedModel, max_rows: int = 1024, recorder: Recorder | None = None
    ) -> None:
        """Records steps of up to `max_rows` rows; 0 records none."""
        super().__init__(model)
        self._decoder = triton_attention.decoder
        self.graphs = DecodeGraphs(
            self._step, self.shape, self.vocabulary, max_rows, recorder or CUDARecorder()
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        """As CausalLM's; the logits may be overwritten by the next pass."""
        with _current(self.shape.device):
            return self._forward(token_ids, positions, segments, last)

    def _forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        everything = list(range(len(token_ids)))
        match segments:
            case [DecodeSegment() as segment] if last == everything and self.graphs.takes(segment):
                try:
                    return self.graphs.run(token_ids, positions, segment)
                except CannotRecord:
                    log.warning("decode steps cannot be recorded as graphs", exc_info=True)
        return super().forward(token_ids, positions, segments, last)

    def _step(self, token_ids: Tensor, positions: Tensor, decoder: TritonDecoder) -> Tensor:
        output: Any = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            segments=(),
            decoder=decoder,
        )
        logits: Tensor = output.logits[0]
        return logits


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the one that streams and launches go to."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DecodeGraphs:
    """Recordings of one session's decode step, one per bucket of rows, made when first needed."""

    def __init__(
        self, step: Step, shape: KVShape, vocabulary: int, max_rows: int, recorder: Recorder
    ) -> None:
        self._step = step
        self._vocabulary = vocabulary
        self._recorder = recorder
        self._buckets = buckets(max_rows)
        # Token ids and positions; rows without a candidate keep those of an earlier step.
        self._inputs = torch.zeros(2, max_rows, dtype=torch.int64, device=shape.device)
        self._table = Table(shape.layers, _MOST_PIECES, shape.device)
        self._logits: Tensor | None = None  # float32 [max_rows, vocabulary]
        self.replays: dict[int, Callable[[], None]] = {}

    def takes(self, segment: DecodeSegment) -> bool:
        """Whether `run` can."""
        fits = bool(self._buckets) and 0 < segment.num_rows <= self._buckets[-1]
        return fits and len(segment.pieces) <= self._table.pieces

    def run(self, token_ids: list[int], positions: list[int], segment: DecodeSegment) -> Tensor:
        """Float32 logits [live, vocabulary] of a step; the next call overwrites them.

        Raises:
            CannotRecord: it is the first step of its size, and no step will be taken any more.
        """
        live = segment.num_rows
        self._inputs[:, :live].copy_(torch.tensor([token_ids, positions]))
        self._table.fill(segment)
        rows = next(size for size in self._buckets if size >= live)
        if rows not in self.replays:
            self.replays[rows] = self._record(rows)
        self.replays[rows]()
        assert self._logits is not None
        return self._logits[:live]

    def _record(self, rows: int) -> Callable[[], None]:
        token_ids, positions = self._inputs[:, :rows]
        decoder = TritonDecoder([(slice(0, rows), self._table)])
        if self._logits is None:
            self._logits = torch.empty(
                self._inputs.shape[1], self._vocabulary, device=self._inputs.device
            )
        logits = self._logits[:rows]

        def step() -> None:
            logits.copy_(self._step(token_ids, positions, decoder))

        try:
            return self._recorder(step)
        except RuntimeError as error:
            self._buckets = []
            raise CannotRecord(f"with {rows} rows") from error


class CUDARecorder:
    """Records CUDA graphs that share their memory: only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs `step` for what happens once, such as compilation, then records it.

        What it returns does not run it; its effects must not differ when it runs again.
        """
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._pool = graph.pool()
        return graph.replay


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows, ascending: max_rows and its halves, and three quarters of the large ones."""
    sizes = set()
    size = max_rows
    while size:
        sizes.add(size)
        if size > _FINE_FROM:
            sizes.add(-(-3 * size // 4))
        size = -(-size // 2) if size > 1 else 0
    return sorted(sizes)
