"""The page in a real browser, against all services on toys."""

from __future__ import annotations

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
    joined = await fresh.js(
        """
        const lanes = [...document.querySelectorAll('#live .lane')];
        return lanes.filter((lane) => lane.querySelector('.fork').hasAttribute('d'))
          .map((lane) => Number(lane.dataset.candidate));"""
    )
    assert set(joined) == {fork.id for fork in forks}


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


async def test_a_thousand_candidates_are_few_elements(fresh: Window, client: Client) -> None:
    """Guards against an element per candidate, whose layout takes longer than a frame."""
    await fresh.run(n=1024, max_tokens=40, alpha=0.5, seed=16)
    assert await fresh.ended() == "finished"
    await fresh.frames(5)
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
    assert all("401" in entry["message"] for entry in await fresh.page.log())
    await fresh.page.log("performance")
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
    """Guards against animations, which make some people ill."""
    await fresh.page.prefer("light", prefers_reduced_motion="reduce")
    try:
        await fresh.run(**SEEDED)
        await fresh.until("document.getElementById('live').state.rounds.length")
        assert await fresh.js("return document.getAnimations().length") == 0
        await fresh.ended()
    finally:
        await fresh.page.prefer("light")


async def test_forced_colors_keep_the_marks(fresh: Window) -> None:
    """Guards against lanes that vanish where the system chooses all colors."""
    await fresh.page.prefer("dark", forced_colors="active")
    try:
        await fresh.run(**SEEDED)
        await fresh.ended()
        system, *inks = await fresh.js(
            """
            const probe = document.createElement('i');
            probe.style.color = 'CanvasText';
            document.body.append(probe);
            const marks = [...document.querySelectorAll('#live .lane .mark')];
            const inks = marks.map((each) => getComputedStyle(each).stroke);
            return [getComputedStyle(probe).color, ...inks];"""
        )
        assert len(inks) == 24 and set(inks) == {system}
    finally:
        await fresh.page.prefer("light")


@pytest.mark.parametrize("width", [400, 900, 1600])
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
