"""Users: `locust -f loadtest/locustfile.py --host HOST:PORT`.

Credentials are those of the client's variables, such as SPECREJ_TOKEN. See docs/loadtest.md.
"""

from __future__ import annotations

from locust import events

from loadtest import options, page
from loadtest.users import ApiUser

__all__ = ["ApiUser"]

events.init_command_line_parser.add_listener(options.add_options)  # type: ignore[no-untyped-call]
events.init.add_listener(page.extend)  # type: ignore[no-untyped-call]
