"""Images in OpenAI's content parts: data URIs, which are never fetched."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specrej import images
from specrej.contracts import Image, Prompt
from specrej.contracts.validation import IMAGE_TYPES, MAX_IMAGE_BYTES

_FORM = "must be a data URI: data:image/png;base64,..."
_DECODER = ThreadPoolExecutor(1, "images")


def of_url(url: Any) -> Image:
    """The image in a part's `image_url`: its URL, or an object that has it.

    Raises:
        ValueError: it is no data URI of an image.
    """
    text = url.get("url") if isinstance(url, dict) else url
    if not isinstance(text, str):
        raise ValueError(f"image_url {_FORM}")
    if text[:8].lower().startswith(("http:", "https:", "file:")):
        raise ValueError(f"image_url {_FORM}; URLs are not fetched")
    head, _, data = text.partition(",")
    media_type, _, coding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:") or coding.lower() != "base64":
        raise ValueError(f"image_url {_FORM}")
    return of_base64(media_type, data)


def of_source(source: Any) -> Image:
    """The image in an Anthropic block's `source`.

    Raises:
        ValueError: as `of_base64`, and for URLs and files.
    """
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return of_base64(media_type, data)
    raise ValueError("must be of type base64, with media_type and data: nothing is fetched")


def of_base64(media_type: str, data: str) -> Image:
    """An image of that type.

    Raises:
        ValueError: the type is not supported, or the data too long or not base64.
    """
    media_type = media_type.strip().lower().replace("image/jpg", "image/jpeg")
    if media_type not in IMAGE_TYPES:
        raise ValueError(f"an image must be one of {', '.join(IMAGE_TYPES)}")
    if len(data) > MAX_IMAGE_BYTES // 3 * 4:
        raise ValueError(f"images must have at most {MAX_IMAGE_BYTES} bytes together")
    try:
        return Image(base64.b64decode(data, validate=True), media_type)
    except ValueError:
        raise ValueError("an image must be valid base64") from None


async def upright(prompt: Prompt) -> Prompt:
    """As `specrej.images.upright`, in a thread."""
    if not prompt.images:
        return prompt
    return await asyncio.get_running_loop().run_in_executor(_DECODER, images.upright, prompt)
