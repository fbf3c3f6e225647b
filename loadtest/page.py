"""What Locust's page has of ours: a tab with what answers cost and buy, and no foreign forms."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from flask import Response, jsonify, request

from loadtest.bought import bought
from specrej.security import is_loopback

_KEY = "bought"
_COLUMNS = {
    "algorithm": "Algorithm",
    "n": "N, candidates",
    "users": "Users",
    "answers": "Answers",
    "reward": "Mean reward",
    "tokens": "Tokens per answer",
    "median_s": "Median, s",
    "p95_s": "95 %, s",
    "answers_per_s": "Answers per s",
}


def extend(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`; without a page, nothing."""
    if environment.web_ui:
        environment.web_ui.app.before_request(_check_form)
        environment.web_ui.app.after_request(_add_bought)
        columns = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
        environment.web_ui.template_args |= {
            "extended_tabs": [{"title": "Reward and cost", "key": _KEY}],
            "extended_tables": [{"key": _KEY, "structure": columns}],
        }


def _add_bought(response: Response) -> Response:
    """Add the tab's rows to the statistics that the page polls."""
    if request.endpoint == "locust.request_stats" and response.json:
        rows = bought(response.json["stats"], response.json["user_count"])
        extended = [{"key": _KEY, "data": [one.cells for one in rows]}]
        response.set_data(jsonify({**response.json, "extendedStats": extended}).get_data())
    return response


def _check_form() -> Response | None:
    """Refuse forms that pages of other sites send. Locust accepts them: such a form could send the
    token and a file of this machine to another host."""
    own = request.host_url.rstrip("/")
    host = urlsplit(own).hostname or ""
    # The name of another site may later resolve to this machine.
    is_foreign = is_loopback(request.remote_addr or "") and not is_loopback(host)
    if request.method == "POST" and (is_foreign or request.headers.get("Origin", own) != own):
        return Response("the form is another site's", 403)
    return None
