"""The page in a browser: what tests and pictures do with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specrej.contracts import Generation
from tests.browser import Page
from tests.serving import until

SEEDED: Mapping[str, object] = {"n": 24, "alpha": 0.5, "max_tokens": 96, "seed": 11}
PROMPT = "Give three tips for staying focused while studying."
ENTER, ESCAPE = "\ue007", "\ue00c"


class Window:
    """The page of the gateway at `url`."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    async def load(self, fragment: str = "", width: int = 1600, url: str = "") -> None:
        """Load the page anew, with a hash."""
        await self.page.open("about:blank", width)  # else a new hash alone loads nothing
        await self.page.open(f"{url or self.url}/{fragment}", width)
        await self.js("sessionStorage.clear()")
        try:
            await self.until("document.querySelector('specrej-race')?.lanes")
        except AssertionError as error:
            error.add_note(f"console: {await self.page.log()}")
            raise

    async def js(self, script: str, *arguments: Any) -> Any:
        return await self.page.evaluate(script, *arguments)

    async def until(self, condition: str, bound_s: float = 30) -> None:
        """Wait until the expression is true."""
        script = f"return Boolean({condition})"
        try:
            await until(lambda: self.js(script), bound_s=bound_s, every_s=0.02)
        except TimeoutError:
            raise AssertionError(f"not in {bound_s} s: {condition}") from None

    async def fill(self, **fields: object) -> None:
        """Set fields of the form by their names; booleans are checkboxes."""
        await self.js(
            """
            for (const [name, value] of Object.entries(arguments[0])) {
              const field = document.querySelector(`#ask [name=${name}]`);
              if (typeof value === 'boolean') field.checked = value;
              else field.value = value;
              field.dispatchEvent(new Event('input', { bubbles: true }));
            }""",
            fields,
        )

    async def press(self, name: str) -> None:
        """Click the button, or the link, with this name."""
        pressed = await self.js(
            """
            const named = [...document.querySelectorAll('button, a, summary')]
              .filter((each) => each.textContent.trim() === arguments[0] && each.checkVisibility());
            named[0]?.click();
            return named.length;""",
            name,
        )
        assert pressed == 1, f"{pressed} are named {name}"

    async def run(self, **fields: object) -> None:
        """Fill in the form and send it."""
        await self.until("document.querySelector('#rewards input')")
        await self.fill(**{"prompt": PROMPT, **fields})
        await self.press("Run")

    async def ended(self, race: str = "live") -> str:
        """The phase of a request, once it has ended."""
        state = f"document.getElementById('{race}').state.phase"
        await self.until(f"!['waiting', 'running'].includes({state})")
        await self.frames(2)
        return str(await self.js(f"return {state}"))

    async def frames(self, count: int) -> None:
        """Wait for that many frames."""
        await self.js(
            """
            let left = arguments[0];
            return new Promise((resolve) => {
              const next = () => (left-- ? requestAnimationFrame(next) : resolve());
              next();
            });""",
            count,
        )

    async def state(self, race: str = "live") -> Any:
        """The state that the page draws."""
        return await self.js(f"return document.getElementById('{race}').state")

    async def fates(self, race: str = "live") -> dict[int, str]:
        """The fates of the lanes, by candidate."""
        pairs = await self.js(
            f"""
            const lanes = document.querySelectorAll('#{race} [data-candidate]');
            return [...lanes].map((lane) => [lane.dataset.candidate, lane.dataset.fate]);"""
        )
        fates = {int(candidate): fate for candidate, fate in pairs}
        assert len(fates) == len(pairs), "a candidate has two lanes"
        return fates

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return str(await self.js(f"return document.querySelector('{selector}').textContent"))

    async def check_quiet(self) -> None:
        """Nothing is in the console, and no request left the origin."""
        assert await self.page.log() == []
        urls = [request["url"] for request in await self.requests()]
        assert [url for url in urls if not url.startswith((self.url, "about:blank"))] == []

    async def requests(self) -> list[Any]:
        """The requests since the last call: address and headers."""
        return [
            message["params"]["request"]
            for entry in await self.page.log("performance")
            if (message := json.loads(entry["message"])["message"])["method"]
            == "Network.requestWillBeSent"
        ]

    async def compare(self) -> str:
        """Run the seeded request and its comparison, and open all details; the request's id."""
        await self.run(**SEEDED, compare=True)
        await self.ended()
        await self.ended("other")
        await self.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        return str((await self.state())["id"])

    async def seek(self, thousandths: float) -> None:
        """Show that part of the time of the replay."""
        await self.js(
            """
            const seek = document.getElementById('seek');
            seek.step = 'any';  // a thousandth of a slow request is longer than a round
            seek.value = arguments[0];
            seek.dispatchEvent(new Event('input'));""",
            thousandths,
        )


def fates_of(generation: Generation) -> dict[int, str]:
    """The last fate of each candidate; the answer is the winner."""
    fates = {c.id: c.fate.value for trace in generation.rounds for c in trace.candidates}
    return fates | {generation.best.id: "winner"}
