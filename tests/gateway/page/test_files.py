"""The page's files: what is served, how large it is, and the reducer's own tests under Node."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.gateway.gateways import gateway_at, get
from tests.gateway.page.conftest import need
from tests.programs import ROOT, run

FOLDER = ROOT / "gateway" / "page"
# uPlot 1.6.32 as its package has them: dist/uPlot.iife.min.js, dist/uPlot.min.css, LICENSE.
VENDORED: Mapping[str, str] = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot-license.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
DEAD = "127.0.0.1:1"  # no orchestrator: the page's files need none


async def test_only_this_origin_may_be_loaded_and_called() -> None:
    """Guards against a policy that allows inline code, other origins or frames, and texts that
    become elements; the page's own tests fail for what it refuses."""
    async with gateway_at(DEAD, allow_anonymous=False) as server:
        for path in ("/", "/page/app.js"):
            status, headers, body = await get(server.port, path)
            assert status == 200 and body
            policy = dict(part.strip().split(" ", 1) for part in
                          headers["content-security-policy"].split(";"))  # fmt: skip
            assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
            assert policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


async def test_a_repeated_load_transfers_nothing() -> None:
    """Guards against 150 KB at every load, and against an old page of a new version."""
    async with gateway_at(DEAD) as server:
        _, headers, _ = await get(server.port, "/page/uplot.js")
        assert headers["cache-control"] == "no-cache"
        known = f"if-none-match: {headers['etag']}"
        status, again, body = await get(server.port, "/page/uplot.js", known)
        assert (status, again["etag"], body) == (304, headers["etag"], b"")
        status, _, body = await get(server.port, "/page/uplot.js", 'if-none-match: "other"')
        assert status == 200 and body


@pytest.mark.parametrize("path", ["/page/__init__.py", "/page/..%2fapp.py", "/page/none", "/page/"])
async def test_other_files_are_not_served(path: str) -> None:
    """Guards against sources and files outside of the folder."""
    async with gateway_at(DEAD) as server:
        status, _, _ = await get(server.port, path)
        assert status == 404


def test_the_vendored_library_is_the_published_one() -> None:
    """Guards against an edited or another copy, and one without its licence."""
    for name, digest in VENDORED.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (FOLDER / "uplot-license.txt").read_text()


async def test_the_reducer_under_node() -> None:
    """Runs the tests of the pure parts on recorded streams."""
    node = need(shutil.which("node"), "node")
    tests = Path(__file__).with_name("reduce.test.js")
    await run(node, "--test", tests)
