"""The page by keyboard and screen reader, in both color schemes."""

from __future__ import annotations

import pytest

from tests.gateway.page.conftest import AXE, need
from tests.gateway.page.window import ENTER, ESCAPE, Window

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_keyboard_alone_runs_a_request(fresh: Window) -> None:
    """Guards against controls that need a pointer."""
    await fresh.until("document.querySelector('#rewards input')")
    await fresh.fill(n=8, max_tokens=32)
    await fresh.js("document.querySelector('[name=prompt]').focus()")
    await fresh.page.chord("\ue009", ENTER)
    assert await fresh.ended() == "finished"
    order = []
    await fresh.js("document.activeElement.blur()")
    for _ in range(40):
        await fresh.page.press("\ue004")
        order.append(
            await fresh.js(
                """
                const { name, id, dataset, textContent } = document.activeElement;
                return name || id || dataset.candidate || textContent.trim().slice(0, 20);"""
            )
        )
    assert {"prompt", "n", "algorithm", "run", "compare", "More", "Look back"} <= {*order}
    assert len({name for name in order if name.isdigit()}) == 1, (
        "one lane takes the focus, arrows move it"
    )


VIOLATIONS = """
    const { violations } = await axe.run(document, { resultTypes: ['violations'] });
    return violations.map(({ id, nodes }) => [id, nodes[0].html]);"""


@pytest.mark.long
async def test_axe_finds_nothing(fresh: Window) -> None:
    """Guards against missing names, roles and contrast, in every view and both color schemes."""
    source = need(AXE, "axe-core").read_text()
    request_id = await fresh.compare()
    await fresh.js(source)
    for scheme in ("light", "dark"):
        await fresh.page.prefer(scheme)
        for fragment in ("#watch", f"#record={request_id}"):
            await fresh.js("location.hash = arguments[0]", fragment)
            await fresh.frames(10)
            assert await fresh.js(VIOLATIONS) == [], (scheme, fragment)
        await fresh.press("Token")
        assert await fresh.js(VIOLATIONS) == [], scheme
        await fresh.page.press(ESCAPE)
