"""Files of images for tests."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image as Pillow

from specrej.contracts import Image


def picture(
    kind: str = "png", mode: str = "RGB", size: tuple[int, int] = (16, 12), **how: Any
) -> bytes:
    """A file, one half of which has another colour than the other one."""
    image = Pillow.new("RGB", size, how.pop("colour", (200, 30, 40)))
    image.paste((10, 20, 220), (0, 0, size[0] // 2, size[1]))
    output = io.BytesIO()
    image.convert(mode).save(output, kind, **how)
    return output.getvalue()


def image(**how: Any) -> Image:
    return Image(picture(**how), f"image/{how.get('kind', 'png')}")


def data_uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """A content part of OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": data_uri(data, kind)}}
