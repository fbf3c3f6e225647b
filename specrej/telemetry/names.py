"""Every name that telemetry uses: spans, attributes, metrics with their units and labels.

Names are OpenTelemetry's semantic conventions where these have one (generative AI, RPC), else the
project's own namespace. Prometheus shows dots as underscores, with the unit and `_total` behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAMESPACE = "specrej"

# Buckets in seconds: the conventions' for calls, finer ones for what a step takes.
_CALL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
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


# The resource.
SERVICE_NAME, SERVICE_NAMESPACE = "service.name", "service.namespace"
SERVICE_INSTANCE = "service.instance.id"

# Calls, on all three ports (labels as the conventions name them).
RPC_SYSTEM, RPC_METHOD, RPC_CODE = "rpc.system", "rpc.method", "rpc.response.status_code"
RPC_STARTED = Metric(
    "specrej.rpc.server.started", "counter", "{call}", "started calls", (RPC_METHOD,)
)
RPC_IN_FLIGHT = Metric(
    "specrej.rpc.server.in_flight", "up_down", "{call}", "running calls", (RPC_METHOD,)
)
RPC_DURATION = Metric(
    "rpc.server.call.duration",
    "histogram",
    "s",
    "ended calls, by code",
    (RPC_METHOD, RPC_CODE),
    _CALL_S,
)
RPC_REFUSED = Metric(
    "specrej.rpc.server.refused", "counter", "{call}", "calls ended by bounds", ("reason",)
)  # no_message: none came in time; unread: the reply was not read in time; displaced: by newer
# calls that neither write nor read; calls, tenant_calls: too many run; connection: shut, as its
# client does not read
HEARTBEAT_AGE = Metric(
    "specrej.heartbeat.age", "gauge", "s", "since the compute thread last made progress"
)
EVENT_LOOP_LAG = Metric(
    "specrej.event_loop.lag", "gauge", "s", "longest delay of the event loop since the last export"
)
FILES_REJECTED = Metric(
    "specrej.files.rejected", "gauge", "{file}", "changed files that cannot be used"
)
CERTIFICATE_LIFE = Metric(
    "specrej.certificate.life", "gauge", "s", "until the server's certificate chain expires"
)
LEASES_EXPIRED = Metric(
    "specrej.leases.expired", "counter", "{session}", "streams whose lease ran out"
)

# Requests of the gateway (labels as the conventions name them).
HTTP_METHOD, HTTP_ROUTE = "http.request.method", "http.route"
HTTP_STATUS = "http.response.status_code"
HTTP_DURATION = Metric(
    "http.server.request.duration",
    "histogram",
    "s",
    "ended requests, by status",
    (HTTP_ROUTE, HTTP_STATUS),
    _CALL_S,
)  # 499: the client left
HTTP_IN_FLIGHT = Metric(
    "http.server.active_requests", "up_down", "{request}", "running requests", (HTTP_ROUTE,)
)
HTTP_REFUSED = Metric(
    "specrej.http.refused", "counter", "{connection}", "connections ended by bounds", ("reason",)
)  # late: no headers in time, or a reply unread; pipelined; overloaded; permission_denied;
# invalid_http

# The orchestrator.
ADMISSIONS = Metric(
    "specrej.admission.results", "counter", "{request}", "requests by result", ("result",)
)  # admitted, refused; left: cancelled in the queue
REQUESTS_RUNNING = Metric("specrej.requests.running", "gauge", "{request}", "running requests")
REQUESTS_QUEUED = Metric("specrej.requests.queued", "gauge", "{request}", "queued requests")
TOKENS_QUEUED = Metric(
    "specrej.requests.queued.tokens", "gauge", "{token}", "candidate-tokens of queued requests"
)
TENANT_TOKENS = Metric(
    "specrej.tenants.tokens",
    "gauge",
    "{token}",
    "candidate-tokens that run and wait, of the ten tenants with the most",
    ("tenant",),
)
QUEUE_DURATION = Metric(
    "specrej.queue.duration", "histogram", "s", "time in the queue", (), _CALL_S
)
REQUEST_DURATION = Metric(
    "specrej.request.duration",
    "histogram",
    "s",
    "answered requests, from arrival to answer",
    ("algorithm",),
    _CALL_S,
)
FIRST_ROUND = Metric(
    "specrej.request.first_round",
    "histogram",
    "s",
    "from arrival to the end of the first round",
    ("algorithm",),
    _CALL_S,
)
TOKEN_DURATION = Metric(
    "specrej.request.token.duration",
    "histogram",
    "s",
    "seconds per token of the answer",
    ("algorithm",),
    _TOKEN_S,
)
ANSWERS = Metric(
    "specrej.answers", "counter", "{answer}", "answers by source", ("source",)
)  # run, cache, flight
DEGRADED = Metric(
    "specrej.answers.degraded",
    "counter",
    "{answer}",
    "answers weaker than requested, by degradation",
    ("degradation",),
)
HURRIED = Metric(
    "specrej.answers.hurried",
    "counter",
    "{answer}",
    "deadline-adjusted answers: cut deeper or earlier",
)
CANDIDATES = Metric(
    "specrej.candidates",
    "counter",
    "{candidate}",
    "candidates of opened sessions, by fate",
    ("fate",),
)  # finished, truncated, rejected; abandoned: live when its request ended
BRANCH_ROOTS = Metric(
    "specrej.branching.roots",
    "histogram",
    "{candidate}",
    "candidates of the start whose forks, or themselves, survive a branching cut",
    (),
    _COUNTS,
)
ROUNDS = Metric(
    "specrej.rounds", "counter", "{round}", "rounds by reason of their end", ("ended_by",)
)
TOKENS = Metric(
    "specrej.tokens",
    "counter",
    "{token}",
    "of answered runs: generated, saved (estimated, against Best-of-N), prompt, scored",
    ("kind",),
)
BACKENDS = Metric(
    "specrej.backends", "gauge", "{backend}", "generators and reward services", ("kind", "state")
)  # serving, other_version (unused), away
SESSIONS_MOVED = Metric(
    "specrej.sessions.moved",
    "counter",
    "{session}",
    "sessions that lost their generator, by result",
    ("result",),
)  # moved, failed
CACHE_RESULTS = Metric(
    "specrej.cache.results", "counter", "{lookup}", "lookups of answers, by result", ("result",)
)  # hit, stale, miss, invalid, error; off: there is no Redis
FLIGHT_WAITS = Metric(
    "specrej.flights.waited",
    "counter",
    "{request}",
    "requests that waited for an equal one",
    ("where",),
)  # here, elsewhere

# The generator.
SLOTS = Metric(
    "specrej.slots", "gauge", "{slot}", "KV slots by state; their sum is the capacity", ("state",)
)  # owned, cached, free
SESSIONS = Metric(
    "specrej.sessions", "gauge", "{session}", "sessions by state", ("state",)
)  # open, waiting
STEP_DURATION = Metric(
    "specrej.engine.step.duration", "histogram", "s", "one forward pass with its draws", (), _STEP_S
)
STEP_ROWS = Metric(
    "specrej.engine.step.rows", "histogram", "{row}", "candidates in one step", (), _COUNTS
)
ENGINE_TOKENS = Metric(
    "specrej.engine.tokens", "counter", "{token}", "generated, prefilled, reused", ("kind",)
)

# The reward service.
REWARD = "reward"
REWARD_DURATION = Metric(
    "specrej.reward.duration", "histogram", "s", "a batch, from arrival to scores", (REWARD,),
    _CALL_S,
)  # fmt: skip
REWARD_BATCH = Metric(
    "specrej.reward.batch", "histogram", "{text}", "texts of a batch", (REWARD,), _COUNTS
)
REWARD_TOKENS = Metric("specrej.reward.tokens", "counter", "{token}", "computed", (REWARD,))
REWARD_QUEUED = Metric(
    "specrej.reward.queued", "up_down", "{call}", "batches that wait or run", (REWARD,)
)

# Shadows: see docs/telemetry.md.
_SHADOW_LABELS = ("schedule", REWARD)
SHADOW_REQUESTS = Metric(
    "specrej.shadow.requests",
    "counter",
    "{request}",
    "requests whose shadows ended",
    _SHADOW_LABELS,
)
SHADOW_CORRELATION = Metric(
    "specrej.shadow.correlation",
    "gauge",
    "1",
    "rank correlation of rewards at the decision token and at the end",
    (*_SHADOW_LABELS, "decision_token"),
)
SHADOW_REGRETS = Metric(
    "specrej.shadow.regrets",
    "counter",
    "{request}",
    "requests in which a shadow beat the answer",
    _SHADOW_LABELS,
)
SHADOW_REGRET = Metric(
    "specrej.shadow.regret", "gauge", "1", "share of requests whose best was rejected",
    _SHADOW_LABELS,
)  # fmt: skip
SHADOW_TOKENS = Metric(
    "specrej.shadow.tokens", "counter", "{token}", "generated for shadows", _SHADOW_LABELS
)
SHADOW_GIVEN_UP = Metric(
    "specrej.shadow.given_up", "counter", "{request}", "requests whose shadows were abandoned",
    (*_SHADOW_LABELS, "reason"),
)  # fmt: skip
# reasons: weaker, busy, slots, changed, failed
SHADOW_ALPHA = Metric(
    "specrej.shadow.recommended_alpha", "gauge", "1", "largest alpha within the target regret",
    _SHADOW_LABELS,
)  # fmt: skip

# Spans below a call's span, which has the name of the method.
SPAN_PLAN = "plan"
SPAN_LOOKUP = "lookup"  # of a cached answer
SPAN_FLIGHT, SPAN_SHARED_FLIGHT = "flight", "flight.shared"
SPAN_QUEUE = "queue"
SPAN_OPEN, SPAN_ROUND, SPAN_CLOSE = "open", "round", "close"
SPAN_EXTEND, SPAN_SCORE, SPAN_PRUNE = "extend", "score", "prune"
SPAN_STORE = "store"  # an answer
SPAN_REFRESH = "refresh"  # of a stale answer; a separate trace
SPAN_SHADOWS = "shadows"  # a separate trace, after the answer

# Attributes of the conventions for generative AI and databases.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
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
FAILED_STEP, FAILURE = "specrej.cache.step", "error.type"


def cache_span(purpose: str) -> str:
    """The name of the span of one exchange with Redis."""
    return f"cache.{purpose}"
