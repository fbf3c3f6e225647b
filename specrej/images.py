"""Files of images: what is checked before they are decoded, and decoded. Needs Pillow.

The only file that imports it. A header names the size, so no pixel is decoded of an image that is
too large. Images are decoded one at a time, whatever the number of threads.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from PIL import Image as Pillow
from PIL import PngImagePlugin

from specrej.contracts import Image, Prompt
from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any
from specrej.contracts.validation import IMAGE_TYPES, check_images

# WebP's decoder holds four copies.
MAX_PIXELS = {**dict.fromkeys(IMAGE_TYPES, 2**22), "image/webp": 2**21}
MIN_SIDE, MAX_RATIO = 8, 100  # models' processors cannot read smaller or longer ones
# Of one byte per channel. Others are for print or measurements, and have no one conversion.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_ENDS = {"image/png": b"IEND\xaeB`\x82", "image/jpeg": b"\xff\xd9", "image/gif": b";"}
# Beginnings of metadata in a JPEG. For each piece of EXIF Pillow copies those before it.
_METADATA = re.compile(rb"\xff[\xe0-\xef\xfe]")
# Of a file. Pillow takes 40 bytes or more for each block of a comment in a GIF.
_MAX_PIECES = {"image/jpeg": (1024, "pieces of metadata"), "image/gif": (2**16, "blocks")}
_ORIENTATION, _TURN = 0x0112, Pillow.Transpose  # of EXIF, and what makes an image upright
_TURNS = {
    **{2: _TURN.FLIP_LEFT_RIGHT, 3: _TURN.ROTATE_180, 4: _TURN.FLIP_TOP_BOTTOM},
    **{5: _TURN.TRANSPOSE, 6: _TURN.ROTATE_270, 7: _TURN.TRANSVERSE, 8: _TURN.ROTATE_90},
}
_DECODING = threading.Lock()

logging.getLogger("PIL").setLevel(logging.INFO)  # below, it logs metadata of files
# Of compressed texts, which are not used.
PngImagePlugin.MAX_TEXT_MEMORY = 2**22  # type: ignore[bad-assignment]


def upright(prompt: Prompt) -> Prompt:
    """The prompt with its images checked; those that EXIF says to turn are turned.

    Raises:
        InvalidRequest: there are too many, or one cannot be used.
    """
    raise_if_any(check_images(prompt.images))
    turned = iter([_upright(image, path) for path, image in prompt.images.items()])
    return prompt.with_images(lambda _: next(turned))


def _upright(image: Image, path: str) -> Image:
    with _DECODING, warnings.catch_warnings(action="ignore"):
        decoded = opened(image, path)
        try:
            turn = _TURNS[decoded.getexif().get(_ORIENTATION)]
        except Exception:  # it is upright, or its EXIF is damaged, which Pillow has many errors for
            return image
        output = io.BytesIO()
        # Not by `exif_transpose`, which writes the rest of EXIF again, and fails if it cannot.
        decoded.transpose(turn).save(output, decoded.format, quality=95)
        return Image(output.getvalue(), image.media_type)


def checked(images: Mapping[str, Image]) -> None:
    """Decode images, one at a time, and forget them.

    Raises:
        InvalidRequest: there are too many, or one cannot be used.
    """
    raise_if_any(check_images(images))
    for path, image in images.items():
        with _DECODING:
            opened(image, path)


def opened(image: Image, path: str, *, decodes: bool = True) -> Any:
    """Pillow's image, of which the header is read, and the pixels if it `decodes`; `path`: in
    errors.

    Raises:
        InvalidRequest: it is damaged, of another type, too large or small, or has several frames.
    """
    problem = ""
    try:
        with warnings.catch_warnings(action="ignore"):  # of its size and metadata
            most, pieces = _MAX_PIECES.get(image.media_type, (0, ""))
            if pieces and next(islice(_pieces(image), most, None), None):
                problem = f"must have at most {most} {pieces}"
                raise InvalidRequest([Violation(path, problem)])
            # Of the file's type alone: a file may be one of several types at once.
            kind = image.media_type.removeprefix("image/")
            decoded = Pillow.open(io.BytesIO(image.data), formats=[kind])
            problem = _problem(decoded, image)
            if not problem:
                if decodes:
                    decoded.load()
                return decoded
    except (OSError, ValueError, SyntaxError, MemoryError, struct.error, IndexError, EOFError):
        # Without the decoder's text, which may have bytes of the file.
        problem = f"is damaged, or not an {image.media_type}"
    except Pillow.DecompressionBombError:
        problem = f"must have at most {MAX_PIXELS[image.media_type]} pixels"
    raise InvalidRequest([Violation(path, problem)])


def _pieces(image: Image) -> Iterator[object]:
    """Of a JPEG the pieces of metadata, of a GIF all blocks.

    Raises:
        IndexError, ValueError: a GIF is damaged.
    """
    data = image.data
    if image.media_type == "image/jpeg":
        yield from _METADATA.finditer(data)
        return
    at = 13 + _table_bytes(data[10])
    while data[at] != ord(";"):
        if data[at] not in b"!,":
            raise ValueError
        at += 2 if data[at] == ord("!") else 11 + _table_bytes(data[at + 9])
        while data[at]:
            at += 1 + data[at]
            yield at
        at += 1
        yield at


def _table_bytes(flags: int) -> int:
    """The size of the table of colors that follows in a GIF."""
    return 3 << 1 + (flags & 7) if flags & 0x80 else 0


def _problem(opened: Any, image: Image) -> str:
    """Why an image cannot be used, or empty; of its header, before pixels are decoded."""
    most, (width, height) = MAX_PIXELS[image.media_type], opened.size
    if width * height > most:
        return f"must have at most {most} pixels, has {width} x {height}"
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_RATIO * min(width, height):
        sides = f"must have sides of {MIN_SIDE} pixels or more, none over {MAX_RATIO} times"
        return f"{sides} the other, has {width} x {height}"
    if opened.mode not in MODES:
        return f"must be gray, RGB or of a palette, with 8 bits, is {opened.mode[:8]}"
    if getattr(opened, "is_animated", False):
        return "must have one frame, is animated"
    end = _ENDS.get(image.media_type, b"")
    is_whole = image.data.endswith(end)
    if image.media_type == "image/webp":
        is_whole = int.from_bytes(image.data[4:8], "little") + 8 == len(image.data)
    return "" if is_whole else "is cut off, or has something behind its end"
