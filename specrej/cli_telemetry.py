"""The commands that look at what runs: one request's rounds, and the whole service, live."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from specrej import wire
from specrej.cli_credentials import takes_credentials
from specrej.cli_run import print_json, run_to_end
from specrej.client import Client
from specrej.credentials import Credentials
from specrej.errors import Unavailable
from specrej.stack import Ports
from specrej.top import drawing as facts_drawing
from specrej.top import once, watch
from specrej.trace_view import drawing


@takes_credentials
def trace(
    request: Annotated[str, typer.Argument(help="Its id, as generate prints it.")],
    address: Annotated[
        str, typer.Option(envvar="SPECREJ_ADDRESS", help="The orchestrator, as HOST:PORT.")
    ] = "127.0.0.1:50050",
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until the call's deadline.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show when what happened in a REQUEST, round by round, and its candidates' rewards.

    Of the last requests only, those that still run included; see journal_requests in
    python -m orchestrator --help.
    """
    run_to_end(_trace(request, address, timeout, as_json, credentials))


async def _trace(
    request_id: str, address: str, timeout_s: float, as_json: bool, credentials: Credentials
) -> None:
    async with Client(address, timeout_s=timeout_s, **credentials) as client:
        record = await client.record(request_id)
    if as_json:
        print_json(wire.to_plain(wire.record_to_wire(record)))
    else:
        Console().print(drawing(record))


def top(
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SPECREJ_METRICS_URL",
            help="Prometheus endpoints of the services; repeatable, or a comma between two. Those "
            "of specrej up, if none is given.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    only_once: Annotated[
        bool, typer.Option("--once", help="Look twice, print what happened between, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as one JSON object, once.")
    ] = False,
) -> None:
    """Watch slots, sessions, requests, tokens and rewards of running services."""
    given = metrics_url or Ports().metrics_urls
    urls = [url.strip() for text in given for url in text.split(",") if url.strip()]
    run_to_end(_top(urls, interval, only_once or as_json, as_json))


async def _top(urls: list[str], interval_s: float, is_once: bool, as_json: bool) -> None:
    if not is_once:
        await watch(urls, interval_s, Console())
        return
    seen = await once(urls, interval_s)
    if as_json:
        print_json(asdict(seen))
    else:
        Console().print(facts_drawing(seen))
    if len(seen.failures) == len(urls):
        raise Unavailable("no endpoint answers")
