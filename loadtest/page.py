"""What our load tests add to Locust's page: checked options, tables of rounds and of late arrivals,
and a tab that draws latency against N."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flask import Response, jsonify, request
from locust.runners import STATE_CLEANUP, STATE_RUNNING

from loadtest.options import violations
from loadtest.thresholds import CALLS, Kind, percentile
from loadtest.workload import split_label
from specrej.security import is_loopback

_CHART = Path(__file__).with_name("latency_tab.html")
_LATENCY = "latency-vs-n"
# Tables of what is not a call, by the key of their tabs.
_KINDS = {
    "rounds": (Kind.ADMITTED, Kind.FIRST_ROUND, Kind.BETWEEN_ROUNDS),
    "arrivals": (Kind.LATE, Kind.MISSED),
}
_TITLES = {"rounds": "Rounds", "arrivals": "Late arrivals", _LATENCY: "Latency vs N"}
_COLUMNS = {
    "name": "Request",
    "kind": "Type",
    "count": "# Measured",
    "median": "Median (ms)",
    "p95": "95%ile (ms)",
    "longest": "Max (ms)",
    "tokens": "Average tokens",
}


def extend(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`; without a page, nothing."""
    page = environment.web_ui
    if not page:
        return
    structure = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
    page.template_args |= {
        "extended_tabs": [{"key": key, "title": title} for key, title in _TITLES.items()],
        "extended_tables": [{"key": key, "structure": structure} for key in _TITLES],
    }

    def complete(response: Response) -> Response:
        if request.endpoint == "locust.index":
            text = response.get_data(as_text=True)
            response.set_data(text.replace("</body>", f"{_CHART.read_text('utf-8')}</body>"))
        elif request.endpoint == "locust.request_stats":
            response.set_data(jsonify(_with_tables(response.json, environment.stats)).data)
        return response

    page.app.before_request(_check_form)
    page.app.after_request(complete)


def _check_form() -> Response | None:
    """Refuse forms that pages of other sites send. Locust accepts them: such a form could send the
    token and a file of this machine to another host. Report bad values as the page expects."""
    own = request.host_url.rstrip("/")
    host = urlsplit(own).hostname or ""
    # The name of another site may later resolve to this machine.
    is_foreign = is_loopback(request.remote_addr or "") and not is_loopback(host)
    if request.method == "POST" and (is_foreign or request.headers.get("Origin", own) != own):
        return Response("the form is another site's", 403)
    if request.endpoint != "locust.swarm":
        return None
    broken = list(violations(request.form))
    return jsonify(success=False, message="; ".join(broken)) if broken else None


def _with_tables(report: Any, stats: Any) -> dict[str, Any]:
    """The statistics with rows of calls, and the other rows in tables of their own."""
    calls = [row for row in report["stats"] if row["method"] in ("", *CALLS)]
    tables = {key: list(_rows(stats, kinds)) for key, kinds in _KINDS.items()}
    tables[_LATENCY] = [
        row | dict(zip(("series", "n"), split_label(row["name"]), strict=True))
        for row in _rows(stats, (Kind.ANSWER,))
    ]
    extended = [{"key": key, "data": rows} for key, rows in tables.items()]
    # Locust's page stops at the state "cleanup": it would never show the last answers.
    state = STATE_RUNNING if report["state"] == STATE_CLEANUP else report["state"]
    return {**report, "stats": calls, "extended_stats": extended, "state": state}


def _rows(stats: Any, kinds: Iterable[Kind]) -> Iterator[dict[str, Any]]:
    for (name, kind), entry in sorted(stats.entries.items()):
        if kind in kinds and entry.num_requests:
            yield {
                "name": name,
                "kind": kind,
                "count": entry.num_requests,
                "median": percentile(entry.response_times, 0.5),
                "p95": percentile(entry.response_times, 0.95),
                "longest": round(entry.max_response_time),
                "tokens": round(entry.avg_content_length),
            }
