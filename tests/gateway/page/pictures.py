"""Pictures of the page for the documents, on the embedded models; and its frames at N = 1,024.

`python -m tests.gateway.page.pictures` writes docs/pictures: a running request, its end, the
comparison and the operator's view, each at three widths. Then it replays a request of 1,024
candidates of the toys and prints the mean time of a frame as JSON; above 50 ms it fails.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from PIL import Image

from deploy.local.stack import Stack
from specrej.client import Client
from tests.browser import browser
from tests.gateway.conftest import TOYS
from tests.gateway.page.window import PROMPT, Window

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
# Width of the window, color scheme, and most pixels of height.
SIZES = ((1600, "light", 1060), (900, "dark", 1250), (400, "light", 1250))
_COLORS = 256  # of a picture: there are no photographs
_MAX_FRAME_MS = 50
_SPEED = "0.25"
_FRAMES = """
  const isPlaying = () => document.getElementById('play').textContent === 'Pause';
  return new Promise((resolve) => {
    const times = [];
    const next = (now) => {
      times.push(now);
      if (isPlaying()) requestAnimationFrame(next);
      else resolve((times.at(-1) - times[0]) / (times.length - 1));
    };
    requestAnimationFrame(next);
  });"""


async def picture(window: Window, name: str, width: int, height: int, top: str = "") -> None:
    """Write a picture from the element `top` on."""
    await window.frames(60)
    offset = f"document.querySelector('{top}').getBoundingClientRect().top + scrollY - 12"
    start = await window.js(f"return {offset}") if top and width < 860 else 0
    path = PICTURES / f"page-{name}-{width}.png"
    await window.page.picture(path, start, height)
    with Image.open(path) as image:
        small = reduced(image.convert("RGB"))
    small.save(path, optimize=True)


def reduced(image: Image.Image) -> Image.Image:
    """The image in its most frequent colors, bright ones first: small marks are bright.

    Palettes that Pillow computes change the colors of large areas.
    """
    counted = [(n, c) for n, c in image.getcolors(1 << 24) or [] if isinstance(c, tuple)]
    counted.sort(key=lambda pair: pair[0] * (1 + max(pair[1]) - min(pair[1])), reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in counted[:_COLORS] for part in color])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


async def pictures(window: Window) -> None:
    """All pictures."""
    for width, scheme, height in SIZES:
        await window.page.prefer(scheme)
        await window.load(width=width)
        await window.run(n=32, seed=1, max_tokens=256)
        await window.until("document.getElementById('live').state.position > 80", 120)
        await picture(window, "running", width, height, "#live")
        await window.until("document.getElementById('live').state.phase === 'finished'", 120)
        await picture(window, "end", width, height, "#live")
        await window.run(n=32, seed=1, max_tokens=256, compare=True)
        await window.until("document.getElementById('live').state.phase === 'finished'", 240)
        await window.until("document.getElementById('other').state.phase === 'finished'", 240)
        await picture(window, "compare", width, height, "#compare")
        await window.fill(compare=False)
        await window.press("Operate")
        for seed in range(2, 5):
            await window.js(
                "document.getElementById('ask').elements.seed.value = arguments[0];"
                "document.getElementById('ask').requestSubmit();",
                seed,
            )
            await window.until("document.getElementById('live').state.position > 40", 120)
        await picture(window, "operate", width, height)


async def mean_frame_ms(window: Window, client: Client) -> float:
    """The mean time of a frame while a request of 1,024 candidates is replayed."""
    generation = await client.generate(PROMPT, n=1024, max_tokens=96, seed=1)
    await window.load(f"#record={generation.request_id}")
    await window.until("document.getElementById('past').state.n")
    await window.fill_speed(_SPEED)
    return float(await window.js(_FRAMES))


async def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        async with browser(Path(profile)) as page:
            async with Stack(gateway=True) as stack:
                await pictures(Window(page, stack.gateway_url))
            await page.prefer("light")
            async with (
                Stack(environment=TOYS, gateway=True) as stack,
                Client(stack.orchestrator_address) as client,
            ):
                frame_ms = await mean_frame_ms(Window(page, stack.gateway_url), client)
    print(json.dumps({"candidates": 1024, "mean_frame_ms": round(frame_ms, 1)}))
    if frame_ms > _MAX_FRAME_MS:
        raise SystemExit(f"a frame takes more than {_MAX_FRAME_MS} ms")


if __name__ == "__main__":
    asyncio.run(main())
