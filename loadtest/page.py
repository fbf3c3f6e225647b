"""Checks of the forms that Locust's page sends."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from flask import Response, jsonify, request

from loadtest.options import violations
from specrej.security import is_loopback


def extend(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`; without a page, nothing."""
    if environment.web_ui:
        environment.web_ui.app.before_request(_check_form)


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
