"""Every name that telemetry uses: spans, attributes, metrics with their units and labels.

Names are OpenTelemetry's semantic conventions where these have one (generative AI, RPC), else the
project's own namespace. Prometheus shows dots as underscores, with the unit and `_total` behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

NAMESPACE = "specrej"

# Buckets in seconds: the conventions' for calls, finer ones for what a step takes.
_CALL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
# Those that the conventions for generative AI advise.
_GEN_AI_S = tuple(0.01 * 2**k for k in range(14))
_GEN_AI_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
)
_GEN_AI_TOKENS = tuple(4**k for k in range(14))
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Kind = Literal["counter", "up_down", "gauge", "histogram"]


# Compared by identity: each metric exists once and is looked up at every count.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One instrument; `labels` are all that its values ever carry."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _metric(kind: Kind, name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, kind, unit, description, labels)


_counter = partial(_metric, "counter")
_up_down = partial(_metric, "up_down")
_gauge = partial(_metric, "gauge")


def _seconds(
    name: str, description: str, *labels: str, buckets: tuple[float, ...] = _CALL_S
) -> Metric:
    return Metric(name, "histogram", "s", description, labels, buckets)


def _sizes(name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, "histogram", unit, description, labels, _COUNTS)


# The resource.
SERVICE_NAME, SERVICE_NAMESPACE = "service.name", "service.namespace"
SERVICE_INSTANCE, SERVICE_VERSION = "service.instance.id", "service.version"

# Calls, on all three ports (labels as the conventions name them).
RPC_SYSTEM, RPC_METHOD, RPC_CODE = "rpc.system", "rpc.method", "rpc.response.status_code"
RPC_STARTED = _counter("specrej.rpc.server.started", "{call}", "started calls", RPC_METHOD)
RPC_IN_FLIGHT = _up_down("specrej.rpc.server.in_flight", "{call}", "running calls", RPC_METHOD)
RPC_DURATION = _seconds("rpc.server.call.duration", "ended calls, by code", RPC_METHOD, RPC_CODE)
# Reasons: calls, tenant_calls: too many run
RPC_REFUSED = _counter("specrej.rpc.server.refused", "{call}", "calls beyond a bound", "reason")
HEARTBEAT_AGE = _gauge("specrej.heartbeat.age", "s", "time without progress of a compute thread")
EVENT_LOOP_LAG = _gauge(
    "specrej.event_loop.lag", "s", "longest delay of the event loop in the last minute"
)
FILES_REJECTED = _up_down("specrej.files.rejected", "{file}", "changed files that cannot be used")
CERTIFICATE_LIFE = _gauge(
    "specrej.certificate.life", "s", "time until the first certificate of the process expires"
)
LEASES_EXPIRED = _counter("specrej.leases.expired", "{session}", "streams whose lease ran out")

# Requests of the gateway (labels as the conventions name them).
HTTP_METHOD, HTTP_ROUTE = "http.request.method", "http.route"
URL_SCHEME, HTTP_STATUS = "url.scheme", "http.response.status_code"
_HTTP = (HTTP_METHOD, HTTP_ROUTE, URL_SCHEME)
HTTP_DURATION = _seconds(
    "http.server.request.duration", "ended requests, by status", *_HTTP, HTTP_STATUS
)  # 499: the client left
HTTP_IN_FLIGHT = _up_down("http.server.active_requests", "{request}", "running requests", *_HTTP)

# The conventions' attributes and metrics of generative AI, which dashboards for other servers read.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
TOKEN_TYPE, FAILURE = "gen_ai.token.type", "error.type"
_GEN_AI = (OPERATION, PROVIDER, REQUEST_MODEL)
GEN_AI_DURATION = _seconds(
    "gen_ai.server.request.duration",
    "planned requests, from arrival to their end",
    *(*_GEN_AI, FAILURE),
    buckets=_GEN_AI_S,
)
GEN_AI_FIRST_TOKEN = _seconds(
    "gen_ai.server.time_to_first_token",
    "answered runs, from arrival to the end of the first round, whose best text is the first",
    *_GEN_AI,
    buckets=_GEN_AI_FIRST_S,
)
GEN_AI_TOKEN = _seconds(
    "gen_ai.server.time_per_output_token",
    "seconds per token of the answer behind the first round",
    *_GEN_AI,
    buckets=_TOKEN_S,
)
GEN_AI_USAGE = Metric(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "tokens of prompts (input) and of answers (output)",
    (*_GEN_AI, TOKEN_TYPE),
    _GEN_AI_TOKENS,
)

# The orchestrator.
# Results: admitted, refused; left: cancelled in the queue
ADMISSIONS = _counter("specrej.admission.results", "{request}", "requests by result", "result")
REQUESTS_RUNNING = _gauge("specrej.requests.running", "{request}", "running requests")
REQUESTS_QUEUED = _gauge("specrej.requests.queued", "{request}", "queued requests")
TOKENS_QUEUED = _gauge(
    "specrej.requests.queued.tokens", "{token}", "candidate-tokens of queued requests"
)
TENANT_TOKENS = _gauge(
    "specrej.tenants.tokens",
    "{token}",
    "candidate-tokens that run and wait, of the ten tenants with the most",
    "tenant",
)
QUEUE_DURATION = _seconds("specrej.queue.duration", "time in the queue")
REQUEST_DURATION = _seconds(
    "specrej.request.duration", "answered requests, from arrival to answer", "algorithm"
)
FIRST_ROUND = _seconds(
    "specrej.request.first_round", "from arrival to the end of the first round", "algorithm"
)
TOKEN_DURATION = _seconds(
    "specrej.request.token.duration",
    "seconds per token of the answer",
    "algorithm",
    buckets=_TOKEN_S,
)
# Sources: run, cache, flight
ANSWERS = _counter("specrej.answers", "{answer}", "answers by source", "source")
DEGRADED = _counter(
    "specrej.answers.degraded",
    "{answer}",
    "answers weaker than requested, by degradation",
    "degradation",
)
HURRIED = _counter(
    "specrej.answers.hurried", "{answer}", "deadline-adjusted answers: cut deeper or earlier"
)
CANDIDATES = _counter(
    "specrej.candidates", "{candidate}", "candidates of opened sessions, by fate", "fate"
)  # finished, truncated, rejected; live at the end: stopped, as enough was known, or abandoned
ROUNDS = _counter("specrej.rounds", "{round}", "rounds by reason of their end", "ended_by")
TOKENS = _counter(
    "specrej.tokens",
    "{token}",
    "of answered runs: generated, saved (estimated, against Best-of-N), prompt, scored",
    "kind",
)
BACKENDS = _gauge(
    "specrej.backends", "{backend}", "generators and reward services", "kind", "state"
)  # serving, other_version (than most, serving too), away
REQUESTS_RESTARTED = _counter(
    "specrej.requests.restarted",
    "{request}",
    "requests that lost their generator and started again at another one, by result",
    "result",
)  # answered, failed
CACHE_RESULTS = _counter(
    "specrej.cache.results", "{lookup}", "lookups of answers, by result", "result"
)  # hit, miss, invalid, error; off: there is no Redis
CACHE_FAILURES = _counter(
    "specrej.cache.failures", "{exchange}", "failed exchanges with Redis, by what failed", "step"
)  # connection; or the purpose of a command to which Redis replied with an error
FLIGHT_WAITS = _counter(
    "specrej.flights.waited", "{request}", "requests that waited for an equal one", "where"
)  # here, elsewhere

# The generator.
# States: owned, cached, free
SLOTS = _gauge("specrej.slots", "{slot}", "KV slots by state; their sum is the capacity", "state")
SESSIONS = _gauge("specrej.sessions", "{session}", "sessions by state", "state")  # open, waiting
STEP_DURATION = _seconds(
    "specrej.engine.step.duration", "one forward pass with its draws", buckets=_STEP_S
)
STEP_ROWS = _sizes("specrej.engine.step.rows", "{row}", "candidates in one step")
ENGINE_TOKENS = _counter("specrej.engine.tokens", "{token}", "generated, prefilled, reused", "kind")

# The reward service.
REWARD = "reward"
REWARD_DURATION = _seconds("specrej.reward.duration", "a batch, from arrival to scores", REWARD)
REWARD_BATCH = _sizes("specrej.reward.batch", "{text}", "texts of a batch", REWARD)
REWARD_TOKENS = _counter("specrej.reward.tokens", "{token}", "tokens computed", REWARD)
REWARD_QUEUED = _up_down("specrej.reward.queued", "{call}", "batches that wait or run", REWARD)

# Spans below a call's span, which has the name of the method.
SPAN_PLAN = "plan"
SPAN_LOOKUP = "lookup"  # of a cached answer
SPAN_FLIGHT, SPAN_SHARED_FLIGHT = "flight", "flight.shared"
SPAN_QUEUE = "queue"
SPAN_OPEN, SPAN_ROUND, SPAN_CLOSE = "open", "round", "close"
SPAN_EXTEND, SPAN_SCORE, SPAN_PRUNE = "extend", "score", "prune"
SPAN_STORE = "store"  # an answer

# Attributes of the conventions for generative AI and databases.
CHOICES = "gen_ai.request.choice.count"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_K, TOP_P = "gen_ai.request.top_k", "gen_ai.request.top_p"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
DB_SYSTEM, DB_OPERATION = "db.system.name", "db.operation.name"

# Attributes of the project.
REQUEST_ID = "specrej.request.id"
ALGORITHM, ALPHA = "specrej.algorithm", "specrej.alpha"
SCHEDULE, REWARDS = "specrej.schedule", "specrej.rewards"
NUM_ROUNDS = "specrej.rounds.count"
SOURCE, DEGRADATIONS, WAS_HURRIED = "specrej.source", "specrej.degradations", "specrej.hurried"
SCORE = "specrej.score"  # of the answer
ROUND_NUMBER = "specrej.round.number"
NUM_STARTED, NUM_LIVE = "specrej.round.started", "specrej.round.alive"
NUM_FINISHED, NUM_REJECTED = "specrej.round.finished", "specrej.round.rejected"
DECISION_TOKEN, ENDED_BY = "specrej.round.decision_token", "specrej.round.ended_by"
ROUND_TOKENS = "specrej.round.tokens"
SESSION_SLOTS, FREED_SLOTS = "specrej.round.slots", "specrej.round.slots.freed"
BEST_SCORE = "specrej.round.best_score"
SCORES = "specrej.round.scores"  # the highest MAX_SCORES, best first
MAX_SCORES = 32
SEQUENCE = "specrej.command.sequence"  # of a stream's commands
CACHE_FAILURE = "cache failure"  # an event, with what failed and how
FAILED_STEP = "specrej.cache.step"


def cache_span(purpose: str) -> str:
    """The name of the span of one exchange with Redis."""
    return f"cache.{purpose}"
