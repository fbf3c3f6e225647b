"""The page: static files that watch requests in a browser, served from memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files

from starlette.responses import Response

from gateway.errors import HTTPError

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# Scripts, styles and calls of this origin only; nothing inline.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # the etag makes a repeated load cheap
}


class Page:
    """All files of this package that are no modules."""

    def __init__(self) -> None:
        sources = (file for file in files(__name__).iterdir() if file.is_file())
        self.files: Mapping[str, bytes] = {
            file.name: file.read_bytes()
            for file in sources
            if file.name.rpartition(".")[2] in _TYPES
        }

    def response(self, name: str, headers: Mapping[str, str]) -> Response:
        """A file, or 304 where the client has it.

        Raises:
            HTTPError: there is no such file.
        """
        body = self.files.get(name)
        if body is None:
            raise HTTPError(404, "the page has no such file", "not_found")
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        sent = {**_HEADERS, "etag": etag}
        if headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=sent)
        return Response(body, headers=sent, media_type=_TYPES[name.rpartition(".")[2]])
