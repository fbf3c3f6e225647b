"""Stubs that buf generates for other languages, in their own programs, on all services with toys.

With packages of Debian, nothing is fetched. Go: golang-go, protoc-gen-go, protoc-gen-go-grpc,
golang-google-grpc-dev, golang-github-golang-protobuf-1-5-dev. Java, with a JDK: protobuf-compiler,
protobuf-compiler-grpc-java-plugin, libgrpc-java, libprotobuf-java, libgoogle-common-protos-java,
libnetty-java, libperfmark-java, libgeronimo-annotation-1.3-spec-java.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.programs import ROOT, run
from tests.serving import until_slots_are_free

CLIENTS = ROOT / "clients"
GO = Path("/usr/share/gocode")
GO_SOURCES = (
    "google.golang.org/grpc/clientconn.go",
    "github.com/golang/protobuf/proto/wrappers.go",
)
JARS = [
    *(
        f"grpc-{name}"
        for name in ["api", "context", "core", "netty", "protobuf", "protobuf-lite", "stub"]
    ),
    *["protobuf", "proto-google-common-protos", "guava", "perfmark-api"],
    "geronimo-annotation-1.3-spec",
    *(
        f"netty-{name}"
        for name in [
            "buffer",
            "codec",
            "codec-http",
            "codec-http2",
            "common",
            "handler",
            "resolver",
            "transport",
        ]
    ),
]
CLASS_PATH = [Path(f"/usr/share/java/{name}.jar") for name in JARS]
# Both programs run for seconds, less than the second compiler takes.
QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


def needs(tools: str, files: list[Path]) -> pytest.MarkDecorator:
    """Skip the test unless all of these are installed."""
    missing = [name for name in tools.split() if not shutil.which(name)]
    missing += [path.name for path in files if not path.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"missing: {', '.join(missing)}")


async def generate(language: str, output: Path) -> None:
    """Generate the stubs of a language with the plugins that are installed."""
    template = CLIENTS / language / "buf.gen.yaml"
    buf = Path(sys.executable).with_name("buf")
    await run(buf, "generate", "--template", template, "--output", output)


@needs("go protoc-gen-go protoc-gen-go-grpc", [GO / "src" / name for name in GO_SOURCES])
async def test_go(toys: Stack, tmp_path: Path) -> None:
    await generate("go", tmp_path / "src/specrej.io/go")
    environment = {
        "GO111MODULE": "off",
        "GOFLAGS": "-count=1",
        "GOPATH": f"{tmp_path}:{GO}",
        "SPECREJ_ADDRESS": toys.orchestrator_address,
    }
    await run("go", "test", "-timeout=60s", "./go", folder=CLIENTS, bound_s=300, **environment)
    # Less time than a request of the tests takes that no client cancels.
    await until_slots_are_free(toys.generator_address, bound_s=10)


@needs("javac java protoc grpc_java_plugin", CLASS_PATH)
async def test_java(toys: Stack, tmp_path: Path) -> None:
    await generate("java", tmp_path / "src")
    sources = [*(tmp_path / "src").rglob("*.java"), CLIENTS / "java/ClientTest.java"]
    class_path = ":".join(map(str, [*CLASS_PATH, tmp_path / "classes"]))
    arguments = ("-nowarn", "-proc:none", "-d", "classes", "-cp", class_path)
    quick = (f"-J{option}" for option in QUICK)
    await run("javac", *quick, *arguments, *sources, folder=tmp_path, bound_s=300)
    output = await run(
        *("java", *QUICK, "-cp", class_path, "ClientTest"),
        folder=tmp_path,
        SPECREJ_ADDRESS=toys.orchestrator_address,
    )
    assert "4 passed" in output
    await until_slots_are_free(toys.generator_address, bound_s=10)
