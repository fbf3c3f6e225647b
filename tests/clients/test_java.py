"""Java stubs that buf generates, on all services with toys.

With a JDK and packages of Debian: protobuf-compiler,
protobuf-compiler-grpc-java-plugin, libgrpc-java, libprotobuf-java, libgoogle-common-protos-java,
libnetty-java, libperfmark-java, libgeronimo-annotation-1.3-spec-java.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.clients.programs import CLIENTS, generate, wait_for_free_slots
from tests.programs import run

JARS = Path("/usr/share/java")
NETTY = [
    "buffer",
    "codec",
    "codec-http",
    "codec-http2",
    "common",
    "handler",
    "resolver",
    "transport",
]
NEEDED = [
    *(
        f"grpc-{name}"
        for name in ["api", "context", "core", "netty", "protobuf", "protobuf-lite", "stub"]
    ),
    *["protobuf", "proto-google-common-protos", "guava", "perfmark-api"],
    "geronimo-annotation-1.3-spec",
    *(f"netty-{name}" for name in NETTY),
]
CLASS_PATH = [JARS / f"{name}.jar" for name in NEEDED]
# Both programs run for seconds, less than the second compiler takes.
QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
TOOLS = ("javac", "java", "protoc", "grpc_java_plugin")

missing = [name for name in TOOLS if not shutil.which(name)]
missing += [jar.name for jar in CLASS_PATH if not jar.exists()]
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(bool(missing), reason=f"missing for Java: {', '.join(missing)}"),
]


@pytest.mark.long
async def test_the_stubs(toys: Stack, tmp_path: Path) -> None:
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
    await wait_for_free_slots(toys)
