"""What a service of this kind must survive, by hand, and the cases that show it does.

The ids are the reviewer's list; a test holds the cases against it, so that none goes missing.
"""

from __future__ import annotations

from tests.faults import (
    bad_input,
    caching,
    cancellation,
    engines,
    killed,
    load,
    redis_faults,
    starts,
    stream_order,
    tracing,
)
from tests.faults.case import Case

# One line per sentence of the list.
CHECKLIST: tuple[str, ...] = (
    *("faults/kill-generator", "faults/kill-reward", "faults/kill-orchestrator"),
    *("faults/stop-generator", "faults/stop-reward", "faults/stop-orchestrator"),
    *("faults/redis-absent-at-start", "faults/redis-killed-under-load", "faults/redis-slow-5s"),
    *("faults/redis-hanging", "faults/redis-refused", "faults/redis-reset-mid-reply"),
    *("faults/redis-readonly", "faults/redis-oom", "faults/redis-noperm", "faults/redis-wrongpass"),
    *("faults/redis-loading", "faults/redis-maxclients", "faults/redis-evicting"),
    *("faults/redis-value", "faults/redis-read-cancelled"),
    *("faults/reward-nan", "faults/reward-inf", "faults/reward-too-few", "faults/reward-too-many"),
    *("faults/reward-wrong-ids", "faults/reward-slow", "faults/reward-exhausted"),
    *("faults/reward-nonsense", "faults/degraded"),
    *(
        "faults/reward-raising",
        "faults/reward-exiting",
        "faults/step-raises",
        "faults/out-of-memory",
    ),
    *("faults/engine-thread-dies", "faults/model-fails-to-load"),
    *("faults/collector-down", "faults/collector-hanging"),
    *("faults/client-killed", "faults/client-stops-reading"),
    #
    *("order/prune-before-open", "order/extend-before-open", "order/open-twice"),
    *("order/prune-unknown-duplicate-never-issued", "order/prune-finished"),
    *("order/empty-keep", "order/keep-all", "order/older-sequence-number"),
    *("order/after-half-close", "order/half-close-without-close", "order/idle-past-lease"),
    "order/another-sessions-id",
    #
    *("cancel/queue", "cancel/prefill", "cancel/between-steps", "cancel/reward", "cancel/prune"),
    *("cancel/last-step", "cancel/blocked-write", "cancel/half-of-100"),
    "cancel/1000-open-and-cancel",
    #
    *("bad/prompt-empty", "bad/megabyte", "bad/context", "bad/n", "bad/alpha", "bad/temperature"),
    *("bad/greedy-many", "bad/top-p", "bad/top-k", "bad/max-tokens", "bad/decision-tokens"),
    *("bad/unicode", "bad/model", "bad/enum", "bad/unknown-field", "bad/malformed"),
    *("bad/message-size", "bad/metadata-size", "bad/unknown-method", "bad/deadline"),
    *("bad/stop-strings", "bad/special-tokens", "bad/generator-port", "bad/reward-port"),
    "bad/fuzz",
    #
    *("load/open-loop", "load/refusal-latency", "load/limit-and-queue", "load/two-large"),
    *("load/large-beside-small", "load/health", "load/equal-requests"),
    #
    *("soak/flat", "soak/positive-control", "soak/metric-series"),
    #
    *("starts/any-order", "starts/dependencies-absent", "starts/sigterm-idle"),
    *("starts/sigterm-in-flight", "starts/sigterm-longer-than-grace"),
    *("starts/sigterm-during-load", "starts/sigterm-twice", "starts/no-child-left"),
    #
    *("cache/other-key", "cache/same-key", "cache/never-stored"),
    #
    *("telemetry/server-spans", "telemetry/one-trace", "telemetry/logs-in-trace"),
    *("telemetry/sums", "telemetry/alerts"),
)

CASES: tuple[Case, ...] = (
    *killed.CASES,
    *engines.CASES,
    *redis_faults.CASES,
    *stream_order.CASES,
    *cancellation.CASES,
    *bad_input.CASES,
    *load.CASES,
    *starts.CASES,
    *caching.CASES,
    *tracing.CASES,
)
