"""Users who wait for answers: `locust -f loadtest/locustfile.py --host HOST:PORT`.

All users are streaming ones and unary ones, 3 to 1; name a class to have one kind only. A token and
certificates come by SPECREJ_TOKEN or SPECREJ_TOKEN_FILE, SPECREJ_TLS, SPECREJ_TLS_CA,
SPECREJ_TLS_CERT, SPECREJ_TLS_KEY. More in docs/loadtest.md.
"""

from __future__ import annotations

from locust import events

from loadtest import options, shapes, thresholds
from loadtest.users import StreamingUser, UnaryUser

__all__ = ["StreamingUser", "UnaryUser"]

events.init_command_line_parser.add_listener(options.add_options)  # type: ignore[no-untyped-call]
events.init.add_listener(shapes.use_shape)  # type: ignore[no-untyped-call]
events.quitting.add_listener(thresholds.judge)  # type: ignore[no-untyped-call]
