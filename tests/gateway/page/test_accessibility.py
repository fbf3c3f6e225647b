"""The page by keyboard and screen reader, in all widths and color schemes, with less motion."""

from __future__ import annotations

import re

import pytest

from specrej.client import Client
from tests.gateway.page.conftest import AXE, need
from tests.gateway.page.window import (
    ENTER,
    ESCAPE,
    SEEDED,
    Window,
    fates_of,
    record_of,
)

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
    assert {"prompt", "n", "alpha", "Run", "compare", "Look back"} <= {*order}
    assert sum(name.isdigit() for name in order) == 1, "one lane takes the focus, arrows move it"


async def test_reduced_motion_moves_nothing(fresh: Window) -> None:
    """Guards against animations, which make some people ill: of styles, and of widths in steps."""
    await fresh.until("document.querySelector('specrej-lanes')")
    await fresh.js(
        """
        const lanes = document.querySelector('#live specrej-lanes');
        window.drawn = { frames: 0, other: [] };
        lanes.draw = (state, ...rest) => {
          Object.getPrototypeOf(lanes).draw.call(lanes, state, ...rest);
          if (state.phase !== 'running') return;
          for (const bar of lanes.querySelectorAll('rect.growing')) {
            const end = Number(bar.getAttribute('x')) + Number(bar.getAttribute('width'));
            const { candidate } = bar.parentElement.dataset;
            const lane = state.lanes.find((each) => each.id === Number(candidate));
            if (lane.fate && lane.fate !== 'kept') continue;
            window.drawn.frames++;
            const off = end - lanes.x(Math.max(lane.tokens, state.position));
            if (Math.abs(off) > 0.1) window.drawn.other.push(off);
          }
        };"""
    )
    for reduces in (False, True):
        feature = "reduce" if reduces else "no-preference"
        await fresh.page.prefer("light", prefers_reduced_motion=feature)
        await fresh.js("window.drawn = { frames: 0, other: [] }")
        for _ in range(8):  # a busy machine draws few frames of a run
            await fresh.run(**SEEDED)
            await fresh.until("document.getElementById('live').state.rounds.length")
            if reduces:
                assert await fresh.js("return document.getAnimations().length") == 0
            await fresh.ended()
            drawn = await fresh.js("return window.drawn")
            if drawn["frames"] > 100:
                break
        assert drawn["frames"] > 100 and (drawn["other"] == []) == reduces


COLORS = """
    const probe = document.createElement('i');
    probe.style.color = 'CanvasText';
    document.body.append(probe);
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const rgb = (color) => {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data].join();
    };
    const system = rgb(getComputedStyle(probe).color);
    probe.remove();
    const colors = (selector, name) => [...new Set(all(selector, name).map(rgb))];
    const all = (selector, name) => [...new Set([...document.querySelectorAll(selector)]
      .map((each) => getComputedStyle(each)[name]))];"""


async def test_forced_colors_keep_the_marks(fresh: Window) -> None:
    """Guards against lanes that vanish where the system chooses all colors."""
    await fresh.page.prefer("dark", forced_colors="active")
    await fresh.run(**SEEDED)
    await fresh.ended()
    system, inks = await fresh.js(
        f"{COLORS} return [system, colors('#live .lane .mark', 'stroke')]"
    )
    assert inks == [system] and len(await fresh.fates()) == 24
    lines = await fresh.js(
        f"{COLORS} return [all('nav [aria-current]', 'textDecorationLine'),"
        " all('nav a:not([aria-current])', 'textDecorationLine')]"
    )
    assert lines == [["underline"], ["none"]]


TWIN = """
    const rows = [...document.querySelectorAll(`#${arguments[0]} .twin tbody tr`)];
    return rows.map((row) => [...row.cells].map((cell) => cell.textContent));"""


async def test_the_table_twin_has_the_candidates(fresh: Window, client: Client) -> None:
    """Guards against a table of another request or moment than the picture's."""
    await fresh.js("document.querySelectorAll('.twin').forEach((each) => { each.open = true; })")
    await fresh.run(**SEEDED, algorithm="branching", width=12, keep=3)
    await fresh.ended()
    record = await record_of(fresh, client)
    last = {c.id: c for done in record.rounds for c in done.trace.candidates}
    forks = {fork.id: fork.parent_id for done in record.rounds for fork in done.trace.forks}
    assert await fresh.js(TWIN, "live") == [
        [
            str(number),
            {"winner": "the answer"}.get(fate, fate),
            str(last[number].num_tokens),
            f"{last[number].score:.3f}",
            str(forks.get(number, "\u2013")),
        ]
        for number, fate in sorted(fates_of(record).items())
    ]


async def test_one_sentence_per_round_is_said(fresh: Window, client: Client) -> None:
    """Guards against a status that screen readers read at every event, or never."""
    assert await fresh.js("return document.querySelector('#live .said').role") == "status"
    await fresh.js(
        """
        window.sentences = [];
        const status = document.querySelector('#live [role=status]');
        const note = () => window.sentences.push(status.textContent);
        new MutationObserver(note).observe(status, { childList: true, subtree: true });"""
    )
    await fresh.run(**SEEDED)
    await fresh.ended()
    record = await record_of(fresh, client)
    sentences = await fresh.js("return window.sentences")
    assert len(sentences) == len(set(sentences)) <= len(record.rounds) + 2
    assert any(text.startswith("Round ") for text in sentences)
    assert "is the answer" in sentences[-1]
    for text in sentences[:-1]:
        assert re.match(r"24 candidates have started|Each candidate gets|Round \d+ at token", text)


WIDTHS = (400, 860, 900, 1600)
CUT = """
    const inside = '.panel, .panel *:not(.scroll, .scroll *)';
    const parts = [...document.querySelectorAll(inside)];
    const isCut = (each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1;
    return parts.filter(isCut).map((each) => each.outerHTML.slice(0, 60));"""


async def test_nothing_is_wider_than_the_window(fresh: Window) -> None:
    """Guards against a page that scrolls sideways: loaded narrow, and at every width later."""
    await fresh.load(width=WIDTHS[0])
    request_id = await fresh.compare()
    for width in WIDTHS:
        await fresh.page.resize(width, 900)
        for fragment in ("#watch", f"#record={request_id}", "#operate"):
            await fresh.go(fragment)
            await fresh.frames(5)
            sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
            scrolled, seen = await fresh.js(sizes)
            assert scrolled <= seen == width, (width, fragment)
            assert await fresh.js(CUT) == [], (width, fragment)


VIOLATIONS = """
    const { violations } = await axe.run(document, { resultTypes: ['violations'] });
    return violations.map(({ id, nodes }) => [id, nodes[0].html]);"""


async def test_axe_finds_nothing(fresh: Window) -> None:
    """Guards against missing names, roles and contrast, in every view and both color schemes."""
    source = need(AXE, "axe-core").read_text()
    request_id = await fresh.compare()
    await fresh.js(source)
    for scheme in ("light", "dark"):
        await fresh.page.prefer(scheme)
        for fragment in ("#watch", f"#record={request_id}", "#operate"):
            await fresh.go(fragment)
            await fresh.frames(10)
            assert await fresh.js(VIOLATIONS) == [], (scheme, fragment)
        await fresh.press("Token")
        assert await fresh.js(VIOLATIONS) == [], scheme
        await fresh.page.press(ESCAPE)
