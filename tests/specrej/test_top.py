"""The live view: what endpoints tell, what happened between two looks, and how it is drawn."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specrej.prometheus import Change, Look, look, prometheus_name
from specrej.telemetry import names
from specrej.top import Slots, drawing, facts, slots_bar, watch
from tests.specrej.test_cli import run

NAN = float("nan")
BEFORE = """\
# TYPE specrej_slots gauge
specrej_slots{state="owned"} 100.0
specrej_slots{state="cached"} 50.0
specrej_slots{state="free"} 850.0
# TYPE specrej_sessions gauge
specrej_sessions{state="open"} 2.0
specrej_sessions{state="waiting"} 0.0
# TYPE specrej_rounds_total counter
specrej_rounds_total{ended_by="decision_token"} 10.0
# TYPE specrej_tokens_total counter
specrej_tokens_total{kind="generated"} 1000.0
specrej_tokens_total{kind="saved"} 0.0
# TYPE specrej_cache_results_total counter
specrej_cache_results_total{result="miss"} 5.0
# TYPE specrej_reward_duration_seconds histogram
specrej_reward_duration_seconds_bucket{le="0.1",reward="toy"} 5.0
specrej_reward_duration_seconds_bucket{le="0.2",reward="toy"} 5.0
specrej_reward_duration_seconds_bucket{le="+Inf",reward="toy"} 5.0
specrej_reward_duration_seconds_count{reward="toy"} 5.0
specrej_reward_duration_seconds_sum{reward="toy"} 0.2
"""
AFTER = """\
# TYPE specrej_slots gauge
specrej_slots{state="owned"} 300.0
specrej_slots{state="cached"} 50.0
specrej_slots{state="free"} 650.0
# TYPE specrej_sessions gauge
specrej_sessions{state="open"} 4.0
specrej_sessions{state="waiting"} 1.0
# TYPE specrej_rounds_total counter
specrej_rounds_total{ended_by="decision_token"} 16.0
specrej_rounds_total{ended_by="slots_full"} 4.0
# TYPE specrej_tokens_total counter
specrej_tokens_total{kind="generated"} 1400.0
specrej_tokens_total{kind="saved"} 600.0
# TYPE specrej_cache_results_total counter
specrej_cache_results_total{result="miss"} 8.0
specrej_cache_results_total{result="hit"} 1.0
# TYPE specrej_admission_results_total counter
specrej_admission_results_total{result="refused"} 3.0
# TYPE specrej_reward_duration_seconds histogram
specrej_reward_duration_seconds_bucket{le="0.1",reward="toy"} 5.0
specrej_reward_duration_seconds_bucket{le="0.2",reward="toy"} 15.0
specrej_reward_duration_seconds_bucket{le="+Inf",reward="toy"} 15.0
specrej_reward_duration_seconds_count{reward="toy"} 15.0
specrej_reward_duration_seconds_sum{reward="toy"} 1.7
"""


class Endpoint:
    """A real HTTP server that says what it is told to."""

    def __init__(self) -> None:
        self.body, self.status = b"", 200
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(endpoint.status)
                self.end_headers()
                self.wfile.write(endpoint.body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    serving = Endpoint()
    yield serving
    serving.close()


async def seen(endpoint: Endpoint, text: str, at_s: float) -> Look:
    endpoint.body = text.encode()
    return await look([endpoint.url], 5.0, clock=lambda: at_s)


async def change(endpoint: Endpoint, before: str = BEFORE, after: str = AFTER) -> Change:
    """Two looks, 2 seconds apart."""
    return Change(await seen(endpoint, before, 10.0), await seen(endpoint, after, 12.0))


def drawn(between: Change, width: int = 150) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(drawing(facts(between)))
    return out.getvalue()


async def test_rates_are_differences(endpoint: Endpoint) -> None:
    """Guards against totals since the start shown as rates, and new labels taken for nothing."""
    told = facts(await change(endpoint))
    assert told.rounds == pytest.approx(5.0)
    assert told.refused == pytest.approx(1.5)
    assert told.cache_hits == pytest.approx(0.25)
    assert told.saved == pytest.approx(0.6)
    assert (told.sessions_open, told.sessions_waiting) == (4, 1)
    assert told.slots == Slots(300, 50, 650)


async def test_quantiles_are_of_what_is_new(endpoint: Endpoint) -> None:
    """Guards against quantiles over everything since the start: ten new values, all 0.1 to 0.2."""
    toy = facts(await change(endpoint)).rewards["toy"]
    assert toy.batches == pytest.approx(5.0)
    assert toy.seconds.p50 == pytest.approx(0.15)
    assert toy.seconds.p95 == pytest.approx(0.195)


async def test_a_quantile_beyond_the_last_bound_is_that_bound(endpoint: Endpoint) -> None:
    """As Prometheus has it: guards against an infinite latency."""
    after = AFTER.replace('le="0.2",reward="toy"} 15', 'le="0.2",reward="toy"} 5')
    assert facts(await change(endpoint, after=after)).rewards["toy"].seconds.p50 == 0.2


async def test_nothing_new_is_no_latency(endpoint: Endpoint) -> None:
    """Guards against a division by no values."""
    told = facts(await change(endpoint, AFTER, AFTER))
    assert told.rewards["toy"].seconds.p50 is None
    assert told.rounds == 0 and told.saved is None and told.cache_hits is None


async def test_a_restart_is_no_negative_rate(endpoint: Endpoint) -> None:
    """Guards against "-500 rounds/s" after a process began to count anew."""
    assert facts(await change(endpoint, AFTER, BEFORE)).rounds == pytest.approx(5.0)


async def test_an_endpoint_that_has_just_come_back_has_no_rates(endpoint: Endpoint) -> None:
    """Guards against the count of days shown as that of two seconds."""
    endpoint.status = 500
    before = await seen(endpoint, BEFORE, 10.0)
    endpoint.status = 200
    assert facts(Change(before, await seen(endpoint, AFTER, 12.0))).rounds == 0.0


async def test_several_services_add_up(endpoint: Endpoint) -> None:
    """Guards against one orchestrator of two hidden by the other's equal labels."""
    other = Endpoint()
    try:
        endpoint.body = other.body = BEFORE.encode()
        before = await look([endpoint.url, other.url], 5.0, clock=lambda: 10.0)
        endpoint.body = other.body = AFTER.encode()
        after = await look([endpoint.url, other.url], 5.0, clock=lambda: 12.0)
        told = facts(Change(before, after))
        assert told.slots == Slots(600, 100, 1300) and told.rounds == pytest.approx(10.0)
    finally:
        other.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/metrics", "refused"),
        ("http://nowhere.invalid/metrics", ""),
        ("file:///etc/passwd", "must start with http"),
        ("127.0.0.1:9464", "must start with http"),
    ],
)
async def test_who_does_not_answer_is_shown(endpoint: Endpoint, url: str, why: str) -> None:
    """Guards against a view that ends, or stays silent, when one service does."""
    endpoint.body = AFTER.encode()
    now = await look([endpoint.url, url], 5.0)
    assert why in now.failures[url]
    text = drawn(Change(now, now))
    assert url in text and "300 owned" in text


@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe", b'specrej_slots{state="owned" 1'])
async def test_what_is_no_metrics_is_no_answer(endpoint: Endpoint, body: bytes) -> None:
    """Guards against a traceback for a wrong port."""
    endpoint.body = body
    assert (await look([endpoint.url], 5.0)).failures[endpoint.url]


async def test_a_silent_endpoint_is_given_up() -> None:
    """Guards against a view that waits for one service for ever."""
    with socket.create_server(("127.0.0.1", 0)) as nobody_accepts:
        url = f"http://127.0.0.1:{nobody_accepts.getsockname()[1]}"
        assert "timed out" in (await look([url], 0.2)).failures[url]


def test_no_endpoint_at_all() -> None:
    """Guards against a picture that needs what nobody tells."""
    nothing = Look(1.0, {})
    text = drawn(Change(nothing, nothing))
    assert "slots" in text and "- running" in text


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_bar_is_whole(owned: int, cached: int, free: int) -> None:
    """Guards against bars of changing length, and owned slots that do not show."""
    bar = slots_bar(Slots(owned, cached, free))
    assert len("".join(bar)) == 32
    assert bool(bar[0]) == (owned > 0)


async def test_refusals_and_failures_are_seen(endpoint: Endpoint) -> None:
    text = drawn(await change(endpoint))
    assert "1.50 refused/s" in text and "5 rounds/s" in text
    assert "300 owned (30%)" in text and "saved 60%" in text
    assert "reward toy" in text and "p50 150 ms p95 195 ms" in text


async def test_the_view_goes_on_while_endpoints_come_and_go(endpoint: Endpoint) -> None:
    """Guards against a live view that a restart of a service ends."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, color_system=None)
    looks = iter((200, 500, 200))

    def goes_on() -> bool:
        endpoint.body, endpoint.status = AFTER.encode(), next(looks, 0)
        return bool(endpoint.status)

    await watch([endpoint.url], 0.01, console, goes_on)
    assert "Internal Server Error" in out.getvalue()
    last = out.getvalue().rsplit("specrej top", 1)[1]
    assert "300 owned" in last and "Internal Server Error" not in last


async def test_the_command(endpoint: Endpoint) -> None:
    endpoint.body = AFTER.encode()
    shown, plain, nobody = await asyncio.gather(
        run("top", "--once", "--interval", "0.1", "--metrics-url", endpoint.url),
        run(
            *("top", "--json", "--interval", "0.1"),
            SPECREJ_METRICS_URL=f"{endpoint.url},http://127.0.0.1:1",
        ),
        run("top", "--once", "--interval", "0.1", "--metrics-url", "http://127.0.0.1:1"),
    )
    assert shown.code == 0 and "300 owned" in shown.out
    told = json.loads(plain.out)
    assert (plain.code, told["slots"]["owned"], len(told["failures"])) == (0, 300, 1)
    assert nobody.code == 3 and "127.0.0.1:1: " in nobody.out


def test_names_are_those_of_the_exporter() -> None:
    """Guards against a view of names that no endpoint tells; see tests/deploy for all of them."""
    assert prometheus_name(names.RPC_DURATION) == "rpc_server_call_duration_seconds"
    assert prometheus_name(names.ENGINE_TOKENS) == "specrej_engine_tokens_total"
    assert prometheus_name(names.SLOTS) == "specrej_slots"
