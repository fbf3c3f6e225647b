"""Go stubs that buf generates, under `go test`, on all services with toys.

With packages of Debian, no module is fetched: golang-go, protoc-gen-go, protoc-gen-go-grpc,
golang-google-grpc-dev, golang-github-golang-protobuf-1-5-dev.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.clients.programs import CLIENTS, generate, wait_for_free_slots
from tests.programs import run

DEBIAN = Path("/usr/share/gocode")
TOOLS = ("go", "protoc-gen-go", "protoc-gen-go-grpc")
SOURCES = ("google.golang.org/grpc/clientconn.go", "github.com/golang/protobuf/proto/wrappers.go")

missing = [name for name in TOOLS if not shutil.which(name)]
missing += [name for name in SOURCES if not (DEBIAN / "src" / name).exists()]
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(bool(missing), reason=f"missing for Go: {', '.join(missing)}"),
]


@pytest.mark.long
async def test_the_stubs(toys: Stack, tmp_path: Path) -> None:
    await generate("go", tmp_path / "src/specrej.io/go")
    environment = {
        "GO111MODULE": "off",
        "GOFLAGS": "-count=1",
        "GOPATH": f"{tmp_path}:{DEBIAN}",
        "SPECREJ_ADDRESS": toys.orchestrator_address,
    }
    await run("go", "test", "-timeout=60s", "./go", folder=CLIENTS, bound_s=300, **environment)
    await wait_for_free_slots(toys)
