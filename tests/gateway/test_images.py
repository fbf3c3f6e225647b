"""Images of requests: what is accepted, and that hostile files cost an error and little memory."""

from __future__ import annotations

import io
import json
import logging
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from gateway.fields import parsed
from gateway.requests import ChatRequest, call_of
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest
from specrej.contracts.validation import MAX_IMAGES
from specrej.images import upright
from tests.gateway.gateways import CHAT, gateway_at, post
from tests.images import data_uri, image_part, picture
from tests.programs import ROOT
from tests.specrej.fakes import FakeOrchestrator

_HEAD = b"\x89PNG\r\n\x1a\n"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *, depth: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    """A PNG that has a size, and few pixels; `more`: chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = zlib.compress(bytes(1024))
    return _HEAD + _chunk(b"IHDR", header) + more + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _frames(kind: str) -> bytes:
    output = io.BytesIO()
    frames = [Pillow.new("L", (16, 16), shade) for shade in (0, 90, 200)]
    frames[0].save(output, kind, save_all=True, append_images=frames[1:])
    return output.getvalue()


def _with_size(data: bytes, at: int, size: bytes) -> bytes:
    return data[:at] + size + data[at + len(size) :]


def _cut(webp: bytes) -> bytes:
    """Without its last half, in lengths of files and chunks, too."""
    data = webp[: len(webp) // 4 * 2]
    return _with_size(
        _with_size(data, 4, struct.pack("<I", len(data) - 8)), 16, struct.pack("<I", len(data) - 20)
    )


def large() -> list[tuple[str, bytes]]:
    """Accepted ones that take most memory, with their types."""
    jpeg = picture("jpeg", size=(2048, 2048), progressive=True, subsampling=0)
    webp = picture("webp", "RGBA", (2048, 1024), lossless=True)
    return [("png", picture("png", "RGBA", (2048, 2048))), ("jpeg", jpeg), ("webp", webp)]


def hostile() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Name, type, file."""
    jpeg, gif, webp, png = picture("jpeg"), picture("gif"), picture("webp"), picture()
    lossless = picture("webp", lossless=True)
    bomb = zlib.compress(bytes(2**27), 9)
    yield "png of 32768 x 32768", "png", lambda: _png(2**15, 2**15)  # 4 GiB when decoded
    yield "png of 2**31 - 1 squared", "png", lambda: _png(2**31 - 1, 2**31 - 1)
    yield "png of no width", "png", lambda: _png(0, 16)
    yield "long png", "png", lambda: _png(2**20, 4)
    yield "ribbon", "png", lambda: _png(8000, 8)
    yield "1 x 1", "png", lambda: picture(size=(1, 1))
    yield "gif of 65535 x 65535", "gif", lambda: _with_size(gif, 6, b"\xff" * 4)
    start = jpeg.index(b"\xff\xc0") + 5
    yield "jpeg of 65535 x 65535", "jpeg", lambda: _with_size(jpeg, start, b"\xff" * 4)
    yield "webp of 16383 x 16383", "webp", lambda: _with_size(lossless, 21, b"\xff\xff\xff\x0f")
    yield "truncated png", "png", lambda: png[:-20]
    yield "truncated jpeg", "jpeg", lambda: jpeg[:-20]
    yield "truncated gif", "gif", lambda: gif[:-10]
    yield "truncated webp", "webp", lambda: webp[:-10]
    yield "png without pixels", "png", lambda: _png(1024, 1024)
    yield "large png, cut", "png", lambda: picture(size=(2048, 2048))[:-40] + png[-12:]
    yield "large webp, cut", "webp", lambda: _cut(picture("webp", size=(2048, 1024), lossless=True))
    yield "header alone", "png", lambda: _HEAD
    yield "png and zip", "png", lambda: png + b"PK\x03\x04" + bytes(40)
    yield "jpeg and script", "jpeg", lambda: jpeg + b"<script>alert(1)</script>"
    yield "gif that is script", "gif", lambda: b"GIF89a/*" + gif[8:] + b"*/=1;alert(1)//"
    yield "webp and zip", "webp", lambda: webp + b"PK\x03\x04" + bytes(40)
    yield "svg", "png", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    yield "tiff as png", "png", lambda: picture("tiff")
    yield "animated gif", "gif", lambda: _frames("gif")
    yield "animated png", "png", lambda: _frames("png")
    yield "animated webp", "webp", lambda: _frames("webp")
    yield "cmyk", "jpeg", lambda: picture("jpeg", "CMYK")
    yield "16 bits", "png", lambda: _png(16, 16, depth=16, colour=0)
    text = _chunk(b"zTXt", b"a\0\0" + bomb)
    yield "png with a text of 128 MiB", "png", lambda: _png(16, 16, more=text)
    profile = _chunk(b"iCCP", b"a\0\0" + bomb)
    yield "png with a profile of 128 MiB", "png", lambda: _png(16, 16, more=profile)
    yield "png with a wrong checksum", "png", lambda: _with_size(png, 30, b"\0\0\0")
    segment = b"\xff\xe1\0\x12Exif\0\0" + bytes(10)  # each is appended to all before it
    yield "many pieces of exif", "jpeg", lambda: jpeg[:2] + segment * 300_000 + jpeg[2:]
    image, comment = gif.rindex(b",", 0, -10), b"!\xfe\1a\0"
    for name, more in {
        "many comments": comment * 800_000,
        "a comment of many blocks": comment[:2] + comment[2:4] * 2_000_000 + b"\0",
        "many empty comments": (comment[:2] + b"\0") * 1_000_000,
        "comments behind what is no block": b"-" + comment * 800_000,
    }.items():
        yield f"gif with {name}", "gif", lambda more=more: gif[:image] + more + gif[image:]


def chat(*parts: Any, role: str = "user") -> c.Prompt:
    body = {"model": "m", "messages": [{"role": role, "content": [*parts]}]}
    return call_of(parsed(ChatRequest, json.dumps(body).encode()), {}).prompt


def refused(data: bytes, kind: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        upright(chat(image_part(data, kind)))
    (violation,) = caught.value.violations
    assert violation.field == "prompt.messages[0].parts[0]"
    return violation.description


@pytest.mark.parametrize(("name", "kind", "make"), [pytest.param(*h, id=h[0]) for h in hostile()])
def test_hostile_files_are_refused_by_what_is_wrong(
    name: str, kind: str, make: Callable[[], bytes]
) -> None:
    known = ("is damaged", "is cut off", "must have", "must be")
    assert refused(make(), kind).startswith(known)


def test_they_cost_little_memory(tmp_path: Path) -> None:
    """In a process of its own, by the most memory that it ever had. So do the largest images."""
    files = [(kind, make()) for _, kind, make in hostile()]
    assert len(files) >= 30
    for number, (kind, data) in enumerate([*files, *large()]):
        body = {"model": "m", "messages": [{"role": "user", "content": [image_part(data, kind)]}]}
        (tmp_path / f"{number:03}").write_text(json.dumps(body))
    program = [sys.executable, "-m", "tests.gateway.test_images", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=True)
    num_refused, grown = json.loads(done.stdout)
    assert num_refused == len(files)
    assert 2**20 <= grown <= 50 * 2**20


def test_parts_keep_their_order() -> None:
    red, blue = picture(), picture("jpeg")
    prompt = chat(image_part(red), {"type": "text", "text": "and"}, image_part(blue, "jpeg"))
    parts = (c.Image(red), c.TextPart("and"), c.Image(blue, "image/jpeg"))
    assert prompt.messages == (c.Message("user", parts=parts),)
    assert upright(prompt) == prompt


def test_images_that_exif_turns_are_turned() -> None:
    """Whatever else exif says, such as a width that is no number."""
    turned_right = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0\0\x01\x02\0\x04\0\0\0abc\0" + turned_right + bytes(4)
    (part,) = upright(chat(image_part(picture("jpeg", exif=exif), "jpeg"))).messages[0].images
    turned = Pillow.open(io.BytesIO(part.data))
    assert turned.size == (12, 16)
    assert not turned.getexif()
    top, bottom = turned.getpixel((6, 1)), turned.getpixel((6, 14))
    assert isinstance(top, tuple) and isinstance(bottom, tuple)
    assert top[2] > 150 > bottom[2]  # what was left is on top


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0nothing", b"Exif\0\0MM\0*" + b"\xff" * 40])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_common_modes_are_accepted_whatever_exif_says(mode: str, exif: bytes) -> None:
    prompt = chat(image_part(picture(mode=mode, exif=exif)))
    assert upright(prompt) == prompt


async def test_images_arrive_and_errors_name_their_place(
    address: str, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP; nothing of a file is in logs or errors."""
    caplog.set_level(logging.DEBUG)
    exif = Pillow.Exif()
    exif[0x010E] = "S3cret"  # a description
    good = picture("jpeg", size=(40, 30), exif=exif)
    damaged = good[:-20] + bytes(8)
    async with gateway_at(address) as gateway:
        for data in (good, damaged):
            content = [{"type": "text", "text": "Why?"}, image_part(data, "jpeg")]
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            reply = await post(gateway.port, CHAT, body)
            written = f"{reply}{caplog.text}"
            assert "S3cret" not in written
            assert data_uri(data)[30:60] not in written
    (sent,) = orchestrator.requests
    (turn,) = sent.prompt.messages
    assert [part.WhichOneof("kind") for part in turn.parts] == ["text", "image"]
    assert turn.parts[1].image.data == good
    status, _, error = reply
    assert (status, error["error"]["param"]) == (400, "messages[0].content[1]")
    assert "is cut off" in error["error"]["message"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://example.com/a.png", "URLs are not fetched"),
        ("HTTPS://example.com/a.png", "URLs are not fetched"),
        ("file:///etc/passwd", "URLs are not fetched"),
        (5, "data URI"),
        ("data:image/png,abc", "data URI"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "must be one of"),
        ("data:image/png;base64,%%%", "valid base64"),
        (data_uri(bytes(7 << 20)), "at most"),
    ],
)
def test_other_urls_are_refused(url: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat({"type": "image_url", "image_url": {"url": url}})
    (violation,) = caught.value.violations
    assert violation.field == "messages[0].content"
    assert text in violation.description


def test_a_prompt_has_a_most_number_of_images() -> None:
    part = image_part(picture())
    upright(chat(*[part] * MAX_IMAGES))
    with pytest.raises(InvalidRequest, match="at most 16 images, has 17"):
        upright(chat(*[part] * (MAX_IMAGES + 1)))


def _measure(directory: Path) -> None:
    """Print how many of the bodies in the files are refused, and the bytes that they add."""

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    for kind in ("png", "jpeg", "webp", "gif"):
        upright(chat(image_part(picture(kind), kind)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, num_refused = memory("VmRSS"), 0
    for path in sorted(directory.iterdir()):
        try:
            upright(call_of(parsed(ChatRequest, path.read_bytes()), {}).prompt)
        except InvalidRequest:
            num_refused += 1
    print(json.dumps([num_refused, memory("VmHWM") - before]))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
