"""The page in a real browser, against all services on toys."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from deploy.local.stack import Stack
from specrej.client import Client
from specrej.contracts import AnswerSource, Fate, RequestRecord
from tests.gateway.gateways import gateway_at
from tests.gateway.page.conftest import AXE, need
from tests.gateway.page.window import PROMPT, Window
from tests.serving import describe_generator, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEEDED: Mapping[str, object] = {"n": 24, "alpha": 0.5, "max_tokens": 96, "seed": 11}
ENTER, ESCAPE, DOWN, UP, END = "\ue007", "\ue00c", "\ue015", "\ue013", "\ue010"


async def record_of(window: Window, client: Client, race: str = "live") -> RequestRecord:
    return await client.record((await window.state(race))["id"])


def fates_of(record: RequestRecord) -> dict[int, str]:
    """The last fate of each candidate; the answer is the winner."""
    fates = {c.id: c.fate.value for done in record.rounds for c in done.trace.candidates}
    return fates | {record.answer_id: "winner"}


async def test_lanes_have_the_fates_of_the_response(fresh: Window, client: Client) -> None:
    """Guards against lanes that show another cut than the service's, and another answer."""
    await fresh.run(**SEEDED)
    assert await fresh.ended() == "finished"
    record = await record_of(fresh, client)
    assert await fresh.fates() == fates_of(record)
    assert {Fate.REJECTED.value, "winner"} <= set(fates_of(record).values())
    options = {**SEEDED, "temperature": 0.7}
    same = await client.generate(PROMPT, **options)  # type: ignore[arg-type]
    assert await fresh.text("#answer") == same.best.text.strip()
    usage = record.usage
    assert usage and await fresh.text("#live .made") == f"{usage.generated_tokens:,}"
    saved = 1 - usage.generated_tokens / usage.best_of_n_tokens_estimate
    assert await fresh.text("#live .saved") == f"{round(100 * saved)} %"


async def test_lanes_end_where_their_candidates_did(fresh: Window, client: Client) -> None:
    """Guards against a cut drawn at another decision token."""
    await fresh.run(**SEEDED)
    await fresh.ended()
    rounds = (await record_of(fresh, client)).rounds
    ends = {c.id: c.num_tokens for done in rounds for c in done.trace.candidates}
    await fresh.until("document.querySelector('#live [data-fate=winner] .mark')")
    await fresh.frames(60)
    drawn = await fresh.js(
        """
        const [ends] = arguments, lanes = document.querySelector('#live specrej-lanes');
        return [...lanes.querySelectorAll('.lane')].map((lane) => {
          const bar = [...lane.querySelectorAll('.bar')].at(-1);
          const end = Number(bar.getAttribute('x')) + Number(bar.getAttribute('width'));
          return end - lanes.x(ends[lane.dataset.candidate]);
        });""",
        ends,
    )
    assert len(drawn) == 24 and all(abs(distance) < 0.6 for distance in drawn)


async def test_lanes_grow_while_a_round_runs(fresh: Window) -> None:
    """Guards against a picture that changes only when a round ends."""
    await fresh.js(
        """
        window.seen = new Set();
        const look = () => {
          const { state } = document.getElementById('live');
          const bar = document.querySelector('#live .lane .growing');
          if (state.phase === 'running' && !state.rounds.length && bar) {
            window.seen.add(bar.getAttribute('width'));
          }
          if (state.phase !== 'finished') requestAnimationFrame(look);
        };
        look();"""
    )
    await fresh.run(**{**SEEDED, "first": 64, "max_tokens": 128})
    await fresh.ended()
    assert len(await fresh.js("return [...window.seen]")) > 5
    sentence = await fresh.text("#live .said")
    assert sentence.startswith("Candidate ") and "is the answer" in sentence


async def test_stop_frees_the_slots(fresh: Window, stack: Stack) -> None:
    """Guards against a button that only hides what runs on."""
    await fresh.run(n=48, max_tokens=2000, algorithm="best-of-n")
    await fresh.until("document.getElementById('live').state.position > 3")
    assert (await describe_generator(stack.generator_address)).slots.owned > 0
    await fresh.press("Stop")
    assert await fresh.ended() == "stopped"

    async def is_free() -> bool:
        return (await describe_generator(stack.generator_address)).slots.owned == 0

    await until(is_free, bound_s=10)
    await fresh.until("document.getElementById('stop').disabled")
    assert await fresh.text("#live .said") == "The request was stopped."


async def test_a_second_request_replaces_the_first(fresh: Window, stack: Stack) -> None:
    """Guards against the end of the first request in the picture of the second."""
    await fresh.run(n=40, max_tokens=2000, algorithm="best-of-n")
    await fresh.until("document.getElementById('live').state.position > 3")
    await fresh.run(**SEEDED)
    await fresh.until("document.getElementById('live').state.n === 24")
    assert await fresh.ended() == "finished"
    assert len(await fresh.fates()) == 24
    await fresh.until("document.getElementById('stop').disabled")


async def test_forks_grow_out_of_their_parents(fresh: Window, client: Client) -> None:
    """Guards against forks without a lane, or without the line to their parent."""
    await fresh.run(**SEEDED, algorithm="branching", width=12, keep=3)
    assert await fresh.ended() == "finished"
    forks = [fork for done in (await record_of(fresh, client)).rounds for fork in done.trace.forks]
    fates = await fresh.fates()
    assert forks and {fork.id for fork in forks} <= fates.keys()
    await fresh.frames(60)
    joined = await fresh.js(
        """
        const lanes = [...document.querySelectorAll('#live .lane')];
        return lanes.map((lane) => {
          const path = lane.querySelector('.fork').getAttribute('d');
          return [Number(lane.dataset.candidate), path];
        }).filter(([, path]) => path);"""
    )
    assert {candidate for candidate, _ in joined} == {fork.id for fork in forks}
    rows = {lane["id"]: lane["row"] for lane in (await fresh.state())["lanes"]}
    height = await fresh.js("return document.querySelector('#live specrej-lanes').row")
    parents = {fork.id: fork.parent_id for fork in forks}
    for candidate, path in joined:
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
        away = height * (rows[candidate] - rows[parents[candidate]])
        assert numbers[-1] - numbers[1] == pytest.approx(away, abs=0.01), candidate


async def test_a_candidate_shows_its_text_scores_and_fate(fresh: Window, client: Client) -> None:
    """Guards against texts of rejected candidates that are lost, and lanes without the keyboard."""
    await fresh.run(**SEEDED)
    await fresh.ended()
    record = await record_of(fresh, client)
    await fresh.js("document.querySelector('#live .lane[tabindex=\"0\"]').focus()")
    await fresh.page.press(END)
    await fresh.page.press(UP)
    await fresh.frames(3)
    number = int(await fresh.js("return document.activeElement.dataset.candidate"))
    assert number == 22 and await fresh.text("#live .card-head") == "Candidate 22"
    scores = [c.score for done in record.rounds for c in done.trace.candidates if c.id == number]
    shown = await fresh.js(
        """
        const rows = [...document.querySelectorAll('#live .scores tbody tr')];
        return rows.map((row) => row.cells[2].textContent);"""
    )
    assert shown == [f"{score:.3f}" for score in scores]
    words = (await fresh.text("#live .text-so-far")).split()
    ends = [c.num_tokens for done in record.rounds for c in done.trace.candidates if c.id == number]
    assert len(words) == ends[-1]
    assert (await fresh.text("#live .fate-text")).startswith(
        {"rejected": "rejected at token", "finished": "finished at", "winner": "the answer"}[
            fates_of(record)[number]
        ]
    )


async def test_the_same_by_best_of_n_runs_beside_it(fresh: Window, client: Client) -> None:
    """Guards against a comparison of other requests, with figures of one side, or of requests that
    slowed each other down."""
    await fresh.run(**SEEDED, compare=True)
    overlap = (
        "['live', 'other'].every((id) => document.getElementById(id).state.phase === 'running')"
    )
    await fresh.js(
        f"window.overlaps = 0; setInterval(() => {{ window.overlaps += {overlap} ? 1 : 0; }}, 2)"
    )
    assert [await fresh.ended(), await fresh.ended("other")] == ["finished"] * 2
    await fresh.until(
        "!document.querySelector('#compare-reward .verdict').textContent.includes('…')"
    )
    ours, theirs = [await record_of(fresh, client, race) for race in ("live", "other")]
    assert ours.usage and theirs.usage
    assert (ours.n, ours.selection.rewards) == (theirs.n, theirs.selection.rewards)
    assert theirs.usage.generated_tokens == theirs.usage.best_of_n_tokens_estimate
    amounts = await fresh.js(
        "return [...document.querySelectorAll('#compare .amount')].map((e) => e.textContent)"
    )
    tokens = [f"{side.usage.generated_tokens:,}" for side in (ours, theirs) if side.usage]
    assert amounts[2:] == [*tokens, f"{ours.score:.3f}", f"{theirs.score:.3f}"]
    assert all(text.endswith(" s") for text in amounts[:2])
    assert await fresh.js("return window.overlaps") == 0
    fewer = theirs.usage.generated_tokens / ours.usage.generated_tokens
    assert await fresh.text("#compare-tokens .verdict") == f"{fewer:.1f} times fewer"


async def test_a_record_replays_step_by_step_and_at_any_speed(
    fresh: Window, client: Client
) -> None:
    """Guards against a replay that differs from the run, and a player that only runs forwards."""
    generation = await client.generate(PROMPT, n=24, max_tokens=96, seed=12)
    record = await client.record(generation.request_id)
    await fresh.load(f"#record={generation.request_id}")
    await fresh.until("document.getElementById('past').state.n")
    await fresh.js(
        """
        const seek = document.getElementById('seek');
        seek.value = 0;
        seek.dispatchEvent(new Event('input'));"""
    )
    lives: list[int] = []
    for _ in range(len(record.rounds) + 2):
        await fresh.press("Step forward")
        state = await fresh.state("past")
        if len(state["rounds"]) > len(lives):
            lives.append(state["numLive"])
    assert lives == [done.trace.num_live for done in record.rounds]
    await fresh.press("Step back")
    assert len((await fresh.state("past"))["rounds"]) < len(record.rounds) + 1
    await fresh.fill_speed("16")
    await fresh.press("Play")
    assert await fresh.ended("past") == "finished"
    assert await fresh.fates("past") == fates_of(record)


async def test_recent_requests_are_listed_and_lead_to_their_replay(
    fresh: Window, client: Client
) -> None:
    """Guards against a list without the latest request, and a replay without the texts it has."""
    await fresh.run(**SEEDED, cache=False)
    await fresh.ended()
    request_id, answer = (await fresh.state())["id"], await fresh.text("#answer")
    await fresh.press("Look back")
    await fresh.until(f"document.querySelector('#recent a[href=\"#record={request_id}\"]')")
    listed = await fresh.js(
        "return [...document.querySelectorAll('#recent a')].map((e) => e.hash.slice(8))"
    )
    assert listed == [record.request_id for record in await client.records()]
    await fresh.go(f"#record={request_id}")
    await fresh.until("document.getElementById('past').state.n")
    await fresh.fill_speed("16")
    assert await fresh.ended("past") == "finished"
    assert await fresh.text("#past .answer") == answer


async def test_an_answer_from_the_cache_shows_the_run_that_made_it(
    fresh: Window, client: Client
) -> None:
    """Guards against an empty picture where there were no events."""
    await fresh.run(**{**SEEDED, "seed": 13}, cache=True)
    await fresh.ended()
    fates = await fresh.fates()
    await fresh.press("Run")
    await fresh.until("document.getElementById('live').state.flags.includes('cached')")
    await fresh.frames(3)
    assert await fresh.fates() == fates
    assert (await record_of(fresh, client)).source is AnswerSource.CACHE


async def test_an_unknown_record_keeps_the_list(fresh: Window, client: Client) -> None:
    """Guards against an address of a forgotten request that hides all others."""
    await client.generate(PROMPT, n=4, max_tokens=16, seed=17)
    await fresh.go(f"#record={'f' * 32}")
    await fresh.until("document.querySelectorAll('#recent a').length")
    await fresh.until("document.querySelector('#past .problem').checkVisibility()")
    assert await fresh.state("past") | {"phase": "failed", "lanes": []} == await fresh.state("past")
    assert all("404" in entry["message"] for entry in await fresh.page.log())


async def test_operators_see_backends_load_and_totals(fresh: Window, client: Client) -> None:
    """Guards against a tab with figures of another service, or frozen ones."""
    await client.generate(PROMPT, n=4, max_tokens=16, seed=14)
    description = await client.describe()
    await fresh.press("Operate")
    await fresh.until("document.querySelectorAll('#operate tbody tr').length === 2")
    rows = await fresh.js(
        """
        const rows = [...document.querySelectorAll('#operate tbody tr')];
        return rows.map((row) => [...row.cells].map((cell) => cell.textContent));"""
    )
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("generator", description.backends[0].address, "● serving"),
        ("reward service", description.backends[1].address, "● serving"),
    ]
    assert await fresh.text("#operate .answers") == f"{description.num_answers:,}"
    await client.generate(PROMPT, n=4, max_tokens=16, seed=15)
    expected = f"{description.num_answers + 1:,}"
    await fresh.until(f"document.querySelector('#operate .answers').textContent === '{expected}'")


async def test_totals_are_those_of_all_orchestrators(fresh: Window) -> None:
    """Guards against figures of the orchestrator that has answered last: calls alternate."""
    await fresh.js(
        """
        return (async () => {
        const counters = {
          a: { generated_tokens: 200, running: 1, queued: 2, num_answers: 4, num_cached: 1,
            num_refused: 4, num_degraded: 1, num_hurried: 0, saved_tokens_estimate: 0 },
          b: { generated_tokens: 300, running: 2, queued: 3, num_answers: 5, num_cached: 2,
            num_refused: 5, num_degraded: 0, num_hurried: 2, saved_tokens_estimate: 0 },
        };
        const known = await (await fetch('v1/specrej/describe')).json();
        const repeat = window.setInterval;
        let now = 0;
        performance.now = () => now;
        window.setInterval = (work) => repeat(work, 5);
        window.alternate = true;
        window.fetch = async () => {
          now += 1000;
          const process_id = window.alternate && now % 2000 ? 'b' : 'a';
          const counted = { ...known, process_id, ...counters[process_id] };
          counted.generated_tokens *= now / 1000;
          return { ok: true, json: async () => counted };
        };
        })();"""
    )
    await fresh.press("Operate")

    async def shows(**tiles: str) -> None:
        for name, text in tiles.items():
            await fresh.until(
                f"document.querySelector('#operate .{name}').textContent === '{text}'"
            )

    await shows(rate="500", queued="5", running="3", answers="9", refused="9", cached="25 %")
    await shows(weak="1 · 2")
    assert "2 orchestrators" in await fresh.text("#operate .facts")
    await fresh.js("window.alternate = false")
    await shows(rate="200", queued="2", refused="4", cached="20 %")
    assert "one orchestrator" in await fresh.text("#operate .facts")


async def test_a_thousand_candidates_are_few_elements(fresh: Window, client: Client) -> None:
    """Guards against an element per candidate, whose layout takes longer than a frame.

    The time is that of the page's own scripts per frame: that of a frame depends on what else the
    machine does, and `make page-screenshots` prints it.
    """
    await fresh.js(
        """
        window.spent = { ms: 0, frames: 0 };
        const timed = (schedule, isFrame) => (work, ...rest) => schedule((...given) => {
          const began = performance.now();
          work(...given);
          window.spent.ms += performance.now() - began;
          window.spent.frames += isFrame;
        }, ...rest);
        window.requestAnimationFrame = timed(window.requestAnimationFrame, 1);
        window.setTimeout = timed(window.setTimeout, 0);"""
    )
    await fresh.run(n=1024, max_tokens=40, alpha=0.5, seed=16)
    assert await fresh.ended() == "finished"
    await fresh.frames(5)
    spent = await fresh.js("return window.spent")
    assert spent["frames"] > 20 and spent["ms"] / spent["frames"] < 50
    assert await fresh.js("return document.querySelectorAll('#live *').length") < 250
    assert await fresh.js(
        "return document.querySelector('#live specrej-density').checkVisibility()"
    )
    state = await fresh.state()
    fates = {lane["id"]: lane["fate"] for lane in state["lanes"]}
    assert fates == fates_of(await record_of(fresh, client)) and len(fates) == 1024
    await fresh.js("document.querySelector('#live [role=slider]').focus()")
    for candidate in state["rounds"][-1]["candidates"][:2]:
        await fresh.page.press(DOWN)
        await fresh.frames(3)
        assert await fresh.text("#live .card-head") == f"Candidate {candidate['candidate_id']}"


async def test_a_token_stays_in_the_session_and_goes_to_the_gateway(
    fresh: Window, stack: Stack
) -> None:
    """Guards against a token that outlives the tab, and a page that cannot get one."""
    async with gateway_at(
        stack.orchestrator_address, host="127.0.0.1", allow_anonymous=False
    ) as own:
        await fresh.load(url=f"http://127.0.0.1:{own.port}")
        await fresh.until("document.getElementById('token').open")
        await fresh.js("document.querySelector('#token input').value = 'a-token'")
        await fresh.press("Use it")
        await fresh.until("document.querySelector('#rewards input')")
        await fresh.run(n=4, max_tokens=16)
        assert await fresh.ended() == "finished"
        kept = await fresh.js(
            "return [sessionStorage.length, localStorage.length, document.cookie]"
        )
        assert kept == [1, 0, ""]
        requests = await fresh.requests()
        called = [request for request in requests if "/v1/" in request["url"]]
        tokens = [request["headers"].get("authorization") for request in called]
        assert tokens[0] is None and {*tokens[1:]} == {"Bearer a-token"}
        allowed = (f"http://127.0.0.1:{own.port}/", "about:blank")
        assert [each["url"] for each in requests if not each["url"].startswith(allowed)] == []
    assert all("401" in entry["message"] for entry in await fresh.page.log())
    await fresh.load()


async def test_errors_are_shown_with_their_field(fresh: Window) -> None:
    """Guards against a request that seems to wait for ever."""
    await fresh.run(n=4, max_tokens=16, schedule="tokens", tokens="9, 8")
    assert await fresh.ended() == "failed"
    assert "specrej.schedule" in await fresh.text("#live .problem")
    await fresh.page.log()  # the status is in the console


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
        try:
            await fresh.js("window.drawn = { frames: 0, other: [] }")
            await fresh.run(**SEEDED)
            await fresh.until("document.getElementById('live').state.rounds.length")
            if reduces:
                assert await fresh.js("return document.getAnimations().length") == 0
            await fresh.ended()
            drawn = await fresh.js("return window.drawn")
            assert drawn["frames"] > 100 and (drawn["other"] == []) == reduces
        finally:
            await fresh.page.prefer("light")


async def test_a_replay_waits_where_motion_is_reduced(fresh: Window, client: Client) -> None:
    """Guards against a picture that moves on its own as soon as it is opened."""
    generation = await client.generate(PROMPT, n=12, max_tokens=64, seed=18)
    await fresh.page.prefer("light", prefers_reduced_motion="reduce")
    try:
        await fresh.load(f"#record={generation.request_id}")
        await fresh.until("document.getElementById('player').checkVisibility()")
        await fresh.frames(20)
        assert await fresh.text("#play") == "Play"
        assert await fresh.js("return document.getElementById('seek').value") == "0"
        await fresh.press("Play")
        assert await fresh.ended("past") == "finished"
    finally:
        await fresh.page.prefer("light")


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
    try:
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
    finally:
        await fresh.page.prefer("light")


async def test_forced_colors_keep_the_density_view(fresh: Window) -> None:
    """Guards against traces and cuts in the color of the bands below them."""
    await fresh.page.prefer("dark", forced_colors="active")
    try:
        await fresh.run(n=200, max_tokens=64, seed=19)
        await fresh.ended()
        await fresh.js("document.querySelector('#live [role=slider]').focus()")
        await fresh.page.press(DOWN, DOWN)
        await fresh.frames(60)
        system, bars, lost, traces, widths = await fresh.js(
            f"""{COLORS}
            return [system, colors('#live .bar', 'fill'), colors('#live .lost', 'fill'),
              colors('#live .trace', 'stroke'), all('#live .trace:not([d=""])', 'strokeWidth')];"""
        )
        assert lost == traces == [system] and bars and system not in bars
        assert len(widths) == 2, "the answer and the chosen candidate are not alike"
    finally:
        await fresh.page.prefer("light")


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
    await fresh.go(f"#record={record.request_id}")
    await fresh.until("document.getElementById('past').state.n")
    reached = set()
    for share in range(0, 1000, 50):
        await fresh.js(
            """
            const seek = document.getElementById('seek');
            seek.value = arguments[0];
            seek.dispatchEvent(new Event('input'));""",
            share,
        )
        await fresh.frames(2)
        state = await fresh.state("past")
        rows = await fresh.js(TWIN, "past")
        assert len(rows) == len(state["lanes"])
        growing = {row[2] for row in rows if row[1] == "growing"}
        assert growing <= {str(state["position"])}
        reached |= growing
    assert len(reached) > len(record.rounds)


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


@pytest.mark.parametrize("width", [400, 860, 900, 1600])
async def test_nothing_is_wider_than_the_window(fresh: Window, width: int) -> None:
    """Guards against a page that scrolls sideways."""
    await fresh.load(width=width)
    await fresh.run(**SEEDED, compare=True)
    await fresh.ended()
    await fresh.ended("other")
    await fresh.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    request_id = (await fresh.state())["id"]
    for fragment in ("#watch", f"#record={request_id}", "#operate"):
        await fresh.go(fragment)
        await fresh.frames(5)
        sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        scrolled, seen = await fresh.js(sizes)
        assert scrolled <= seen == width, fragment
        cut = await fresh.js(
            """
            const inside = '.panel, .panel *:not(.scroll, .scroll *)';
            const parts = [...document.querySelectorAll(inside)];
            const isCut = (each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1;
            return parts.filter(isCut).map((each) => each.outerHTML.slice(0, 60));"""
        )
        assert cut == [], fragment


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(fresh: Window, scheme: str) -> None:
    """Guards against missing names, roles and contrast, in every view."""
    source = need(AXE, "axe-core").read_text()
    await fresh.page.prefer(scheme)
    try:
        await fresh.run(**SEEDED, compare=True)
        await fresh.ended()
        await fresh.ended("other")
        await fresh.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        await fresh.js(source)
        request_id = (await fresh.state())["id"]
        for fragment in ("#watch", f"#record={request_id}", "#operate"):
            await fresh.go(fragment)
            await fresh.frames(10)
            found = await fresh.js(
                """
                const { violations } = await axe.run(document, { resultTypes: ['violations'] });
                return violations.map(({ id, nodes }) => [id, nodes[0].html]);"""
            )
            assert found == [], fragment
        await fresh.press("Token")
        found = await fresh.js("return (await axe.run(document)).violations.map((each) => each.id)")
        assert found == []
        await fresh.page.press(ESCAPE)
    finally:
        await fresh.page.prefer("light")
