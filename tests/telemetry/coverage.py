"""How much of a request's time its spans account for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.proto.trace.v1 import trace_pb2

from tests.collector import CLIENT, Seen

Span = trace_pb2.Span


def root_of(trace: Sequence[Seen]) -> Seen:
    """The one span without a parent; the parents of all others are there."""
    ids = {seen.span.span_id for seen in trace}
    (root,) = (seen for seen in trace if not seen.span.parent_span_id)
    orphans = [s.name for s in trace if s is not root and s.span.parent_span_id not in ids]
    assert not orphans, f"no parent has come of {orphans}"
    return root


def below(trace: Iterable[Seen], parent: Seen) -> list[Seen]:
    """Its children, as they began."""
    children = [seen for seen in trace if seen.span.parent_span_id == parent.span.span_id]
    return sorted(children, key=lambda seen: seen.span.start_time_unix_nano)


def covered(trace: Sequence[Seen], server: Seen) -> float:
    """The part of the root's time that steps of the call, none of them a call itself, account for.

    What a call to a backend takes is not counted: it lasts as long as nearly everything.
    """
    root = root_of(trace).span
    steps = [seen.span for seen in below(trace, server) if seen.span.kind != CLIENT]
    within = (root.start_time_unix_nano, root.end_time_unix_nano)
    return _union(((s.start_time_unix_nano, s.end_time_unix_nano) for s in steps), within) / (
        within[1] - within[0]
    )


def _union(intervals: Iterable[tuple[int, int]], within: tuple[int, int]) -> int:
    total, until = 0, within[0]
    for start, end in sorted(intervals):
        start, end = max(start, until), min(end, within[1])
        total += max(0, end - start)
        until = max(until, end)
    return total
