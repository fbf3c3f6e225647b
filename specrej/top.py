"""A live view of the service, from what its Prometheus endpoints tell.

What two looks tell, and how it is drawn, are pure functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specrej.prometheus import Change, Look, look
from specrej.telemetry import names

_BAR_CELLS = 32
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Slots:
    """Of all generators."""

    owned: float
    cached: float
    free: float

    @property
    def capacity(self) -> float:
        return self.owned + self.cached + self.free


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of what ended since the last look; None: nothing did."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """One reward; rates are per second."""

    queued: float | None
    batches: float | None
    tokens: float | None
    seconds: Spread


@dataclass(frozen=True, slots=True)
class Facts:
    """The service at a glance: values as of now, rates per second since the last look.

    None: nobody tells it, or nothing happened that could be measured.
    """

    failures: Mapping[str, str]  # by endpoint that does not answer
    seconds: float  # since the last look
    slots: Slots | None
    sessions_open: float | None
    sessions_waiting: float | None
    requests_running: float | None
    requests_queued: float | None
    admitted: float | None
    refused: float | None
    answers: Mapping[str, float]  # by source
    degraded: float | None
    hurried: float | None
    cache_hits: float | None  # share of lookups
    rounds: float | None
    first_round: Spread
    request: Spread
    tokens: Mapping[str, float]  # by kind, as the engine makes or reads them
    scored: float | None
    saved: float | None  # share of Best-of-N's tokens
    step: Spread
    step_rows: float | None
    step_busy: float | None  # share of the time, of all engines
    rewards: Mapping[str, RewardFacts]
    heartbeat_age_s: float | None
    leases_expired: float | None


def facts(change: Change) -> Facts:
    """What two looks tell."""
    now = change.after
    return Facts(
        failures=now.failures,
        seconds=change.seconds,
        slots=_slots(now),
        sessions_open=now.value(names.SESSIONS, state="open"),
        sessions_waiting=now.value(names.SESSIONS, state="waiting"),
        requests_running=now.value(names.REQUESTS_RUNNING),
        requests_queued=now.value(names.REQUESTS_QUEUED),
        admitted=change.rate(names.ADMISSIONS, result="admitted"),
        refused=change.rate(names.ADMISSIONS, result="refused"),
        answers=_rates(change, names.ANSWERS, "source"),
        degraded=change.rate(names.DEGRADED),
        hurried=change.rate(names.HURRIED),
        cache_hits=_share(_rates(change, names.CACHE_RESULTS, "result"), ("hit", "stale")),
        rounds=change.rate(names.ROUNDS),
        first_round=_spread(change, names.FIRST_ROUND),
        request=_spread(change, names.REQUEST_DURATION),
        tokens=_rates(change, names.ENGINE_TOKENS, "kind"),
        scored=change.rate(names.REWARD_TOKENS),
        saved=_saved(_rates(change, names.TOKENS, "kind")),
        step=_spread(change, names.STEP_DURATION),
        step_rows=change.mean(names.STEP_ROWS),
        step_busy=change.busy(names.STEP_DURATION),
        rewards={
            name: _reward(change, name)
            for name in now.label_values(names.REWARD_DURATION, names.REWARD)
        },
        heartbeat_age_s=now.highest(names.HEARTBEAT_AGE),
        leases_expired=change.rate(names.LEASES_EXPIRED),
    )


def _slots(now: Look) -> Slots | None:
    owned, cached, free = (
        now.value(names.SLOTS, state=state) for state in ("owned", "cached", "free")
    )
    if owned is None or cached is None or free is None:
        return None
    return Slots(owned, cached, free)


def _reward(change: Change, name: str) -> RewardFacts:
    return RewardFacts(
        queued=change.after.value(names.REWARD_QUEUED, reward=name),
        batches=change.events(names.REWARD_DURATION, reward=name),
        tokens=change.rate(names.REWARD_TOKENS, reward=name),
        seconds=_spread(change, names.REWARD_DURATION, reward=name),
    )


def _rates(change: Change, metric: names.Metric, label: str) -> dict[str, float]:
    values = change.after.label_values(metric, label)
    return {value: change.rate(metric, **{label: value}) or 0.0 for value in values}


def _spread(change: Change, metric: names.Metric, **labels: str) -> Spread:
    return Spread(change.quantile(0.5, metric, **labels), change.quantile(0.95, metric, **labels))


def _share(rates: Mapping[str, float], of: Sequence[str]) -> float | None:
    total = sum(rates.values())
    return sum(rates.get(name, 0.0) for name in of) / total if total else None


def _saved(rates: Mapping[str, float]) -> float | None:
    return _share({kind: rates.get(kind, 0.0) for kind in ("saved", "generated")}, ("saved",))


# Drawing


def drawing(seen: Facts, title: str = "") -> RenderableType:
    """One look, for a terminal or a pipe."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows(seen):
        table.add_row(name, text)
    failures = [Text(f"{url}: {why}", "red") for url, why in sorted(seen.failures.items())]
    return Group(*([Text(title, "dim")] if title else []), table, *failures)


def rows(seen: Facts) -> list[tuple[str, Text]]:
    """Names and texts, in order."""
    return [
        ("slots", _slots_text(seen.slots)),
        ("sessions", _joined(_n(seen.sessions_open, "open"), _n(seen.sessions_waiting, "waiting"))),
        ("requests", _joined(
            _n(seen.requests_running, "running"), _n(seen.requests_queued, "queued"),
            _n(seen.admitted, "admitted/s"), _alarming(seen.refused, "refused/s"),
        )),
        ("answers", _joined(
            *(_n(rate, f"{source}/s") for source, rate in seen.answers.items()),
            _alarming(seen.degraded, "degraded/s"), _n(seen.hurried, "hurried/s"),
            f"cache hits {_percent(seen.cache_hits)}",
        )),
        ("rounds", _joined(
            _n(seen.rounds, "rounds/s"), f"first after {_spread_text(seen.first_round)}",
            f"answer after {_spread_text(seen.request)}",
        )),
        ("tokens", _joined(
            *(_n(rate, f"{kind}/s") for kind, rate in seen.tokens.items()),
            _n(seen.scored, "scored/s"), f"saved {_percent(seen.saved)}",
        )),
        ("step", _joined(
            _spread_text(seen.step), _n(seen.step_rows, "candidates"),
            f"busy {_percent(seen.step_busy)}",
        )),
        *((f"reward {name}", _reward_text(reward)) for name, reward in seen.rewards.items()),
        ("health", _joined(
            f"last sign of life {_seconds(seen.heartbeat_age_s)} ago",
            _alarming(seen.leases_expired, "leases expired/s"),
        )),
    ]  # fmt: skip


def slots_bar(slots: Slots) -> tuple[str, str, str]:
    """Owned, cached and free as cells of one bar; whatever is owned shows."""
    scale = _BAR_CELLS / slots.capacity if slots.capacity else 0.0
    owned = min(_BAR_CELLS, max(int(slots.owned > 0), round(scale * slots.owned)))
    cached = min(_BAR_CELLS - owned, round(scale * slots.cached))
    return "█" * owned, "▒" * cached, "░" * (_BAR_CELLS - owned - cached)


def _slots_text(slots: Slots | None) -> Text:
    if slots is None:
        return Text(_NOTHING)
    owned, cached, free = slots_bar(slots)
    share = slots.owned / slots.capacity if slots.capacity else 0.0
    return Text.assemble(
        (owned, "green"), (cached, "blue"), (free, "dim"),
        f"  {slots.owned:,.0f} owned ({share:.0%})",
        f"  {slots.cached:,.0f} cached  {slots.free:,.0f} free",
    )  # fmt: skip


def _reward_text(reward: RewardFacts) -> Text:
    return _joined(
        _n(reward.queued, "queued"),
        _n(reward.batches, "batches/s"),
        _spread_text(reward.seconds),
        _n(reward.tokens, "tokens/s"),
    )


def _joined(*parts: str | Text) -> Text:
    return Text("   ").join(Text(part) if isinstance(part, str) else part for part in parts)


def _n(value: float | None, what: str) -> str:
    """A count or a rate; whole numbers as such."""
    if value is None:
        return f"{_NOTHING} {what}"
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {what}"


def _alarming(value: float | None, what: str) -> Text:
    return Text(_n(value, what), "bold red" if value else "")


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.0%}"


def _spread_text(spread: Spread) -> str:
    if spread.p50 is None or spread.p95 is None:
        return f"p50 {_NOTHING} p95 {_NOTHING}"
    return f"p50 {_seconds(spread.p50)} p95 {_seconds(spread.p95)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


# Looking


async def once(urls: Sequence[str], interval_s: float) -> Facts:
    """Two looks, `interval_s` seconds apart."""
    before = await look(urls, _timeout_s(interval_s))
    await asyncio.sleep(interval_s)
    return facts(Change(before, await look(urls, _timeout_s(interval_s))))


async def watch(
    urls: Sequence[str],
    interval_s: float,
    console: Console,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Draw the service again and again, whatever becomes of its endpoints, until cancelled."""
    before = await look(urls, _timeout_s(interval_s))
    with Live(_title(urls, interval_s), console=console, auto_refresh=False, screen=False) as live:
        while goes_on():
            await asyncio.sleep(interval_s)
            after = await look(urls, _timeout_s(interval_s))
            title = _title(urls, interval_s)
            live.update(drawing(facts(Change(before, after)), title), refresh=True)
            before = after


def _title(urls: Sequence[str], interval_s: float) -> str:
    return f"specrej top  {datetime.now():%H:%M:%S}  every {interval_s:g} s  {', '.join(urls)}"


def _timeout_s(interval_s: float) -> float:
    return max(1.0, interval_s)
