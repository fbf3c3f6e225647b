"""The comparison of answers: turns, unavailable systems, and runs on toys."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from benchmarks import answer
from benchmarks.answer import Record, common, differences, points, write_picture
from benchmarks.engines import Engine, WorkerError, WorkerProcess, answering
from experiments.prompts import DEFAULT_PROMPTS, Item
from specrej import Prompt, Unavailable
from specrej.contracts import Scores

ITEM = Item("one", 0, Prompt.from_user("One?"))


@pytest.mark.parametrize("text", ["", "a", "0", "4,,8", "1e9", "99999"])
def test_invalid_numbers_of_candidates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--n .* must be 1 \.\. "):
        answer.parse_systems("vllm", text)
    with pytest.raises(ValueError, match=r"--systems vllm=.* must be 1 \.\. "):
        answer.parse_systems(f"specrej,vllm={text.replace(',', '+') or '+'}", "4")
    own = answer.parse_systems("specrej,vllm=64", "64,16,64")
    assert own == {"specrej": [16, 64], "vllm": [64]}
    with pytest.raises(ValueError, match="vllm occurs twice"):
        answer.parse_systems("vllm=16,vllm=64", "4")


def test_every_conversation_begins_with_a_system_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    own = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    }
    path.write_text(json.dumps(["Why?", own]))
    items = answer.read_items([path, tmp_path / "absent.json"])
    assert [item.number for item in items] == [0, 1]
    systems = [item.prompt.turns[0] for item in items]
    assert systems[0] == answer.SYSTEM_TURN
    assert (systems[1].role, systems[1].content) == ("system", "Be brief.")


async def test_systems_take_turns_and_a_failure_ends_one_case_only() -> None:
    calls: list[tuple[str, int, str]] = []

    async def works(item: Item, n: int, max_tokens: int) -> tuple[str, int]:
        calls.append(("works", n, item.id))
        return "text", n * max_tokens

    async def fails(item: Item, n: int, max_tokens: int) -> tuple[str, int]:
        calls.append(("fails", n, item.id))
        if n == 4:
            raise WorkerError("no answer within 1 s")
        return "text", 1

    systems: dict[str, answer.System] = {"fails": fails, "works": works}
    ns = {"fails": [2, 4], "works": [2, 4, 8]}
    record = Record(Path())
    bench = answer.Bench(systems, ns, judge_of(Rewards()), record, settle_s=0.0)
    for number, name in enumerate(("first", "second")):
        await bench.answer(replace(ITEM, id=name, number=number), max_tokens=8)
    assert record.unavailable == {("fails", 4): "no answer within 1 s"}
    works_at = [("works", n) for n in (2, 4, 8)]
    first = [("fails", 2), ("fails", 4), *works_at]
    assert calls[:5] == [(*case, "first") for case in first]
    # The second prompt: without the failed case.
    assert calls[5:] == [(*case, "second") for case in (("fails", 2), *works_at)]
    assert [a["tokens"] for a in record.answers if a["system"] == "works"] == [16, 32, 64] * 2


async def test_a_peer_of_another_version_adds_no_answers() -> None:
    """Guards against two versions of a peer in one curve."""
    spec = Spec("vllm", "", "", {"clock": [0.0]})
    rewards: Any = Rewards()
    earlier = answer.Peer(spec, None, 60.0, {"vllm": "0"})
    with pytest.raises(WorkerError, match=r"{'vllm': '1'} now, {'vllm': '0'} in earlier"):
        await earlier.answer(rewards, "r", ITEM, 4, 8)
    for versions in ({}, {"vllm": "1"}):
        peer = answer.Peer(spec, None, 60.0, versions)
        await peer.answer(rewards, "r", ITEM, 4, 8)
        assert peer.versions == {"vllm": "1"}


async def test_peer_without_its_server_has_the_servers_reason(tmp_path: Path) -> None:
    """A missing server is started once, not once per N."""
    server = answer.Peer(Engine("vllm", "", "", {}, home=tmp_path / "none"), None, 1.0)
    client = answer.Peer(Engine("its_hub", "", "", {}), server, 1.0)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"^vllm does not start: .*bin/python does not exist"):
            await client.prepare(None, "", ITEM)  # type: ignore[arg-type]


@dataclass
class Worker:
    """A double of a worker process: takes 100 s to start, and fails with 64 candidates."""

    clock: list[float]
    requests: list[int] = field(default_factory=list)

    def ready(self) -> dict[str, str]:
        self.clock[0] += 100
        return {"vllm": "1"}

    def exchange(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        if "scores" in message:
            return {"text": "text", "tokens": 1}
        self.requests.append(message["n"])
        self.clock[0] += 1
        if message["n"] == 64:
            raise WorkerError("no answer in time")
        return {"score": ["text"]}

    def stop(self) -> None:
        pass


class Spec(Engine):
    """A double of a peer's engine."""

    def start(self, threads: int) -> WorkerProcess:
        worker: Any = Worker(self.options["clock"])
        return cast("WorkerProcess", worker)


class Rewards:
    """A double of the reward service: every score is 0.5, or the service is away."""

    def __init__(self, is_away: bool = False) -> None:
        self.is_away = is_away

    async def score(self, prompt: Prompt, texts: list[str], reward: str) -> Scores:
        if self.is_away:
            raise Unavailable("the reward service is away")
        return Scores((0.5,) * len(texts), 1)


async def test_starts_are_outside_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards peers against the seconds of a restart, their own and that of the server they call."""
    clock = [0.0]
    monkeypatch.setattr("benchmarks.answer.time.perf_counter", lambda: clock[0])
    server = answer.Peer(Spec("vllm", "", "", {"clock": clock}), None, 60.0)
    client = answer.Peer(Spec("its_hub", "", "", {"clock": clock}), server, 60.0)
    rewards: Any = Rewards()
    peers = {"vllm": server, "its_hub": client}
    bench = answer.Bench(
        {name: partial(peer.answer, rewards, "r") for name, peer in peers.items()},
        {"vllm": [4, 64], "its_hub": [4]},
        judge_of(rewards),
        record := Record(Path()),
        prepare={name: partial(peer.prepare, rewards, "r") for name, peer in peers.items()},
        settle_s=0.0,
    )
    for number in range(2):
        await bench.answer(replace(ITEM, id=str(number)), max_tokens=8)
    assert record.unavailable == {("vllm", 64): "no answer in time"}
    assert [(given["system"], given["seconds"]) for given in record.answers] == [
        ("vllm", 1),
        ("its_hub", 1),
    ] * 2


@pytest.mark.parametrize("away", ["peer", "judge"])
async def test_a_failed_score_ends_one_case_only(away: str) -> None:
    """Guards hours of answers against one error of the reward service."""
    peer = answer.Peer(Spec("vllm", "", "", {"clock": [0.0]}), None, 60.0)
    rewards: Any = Rewards(is_away=away == "peer")
    judges: Any = Rewards(is_away=away == "judge")
    record, systems = Record(Path()), {"vllm": partial(peer.answer, rewards, "r")}
    bench = answer.Bench(systems, {"vllm": [4]}, judge_of(judges), record, settle_s=0.0)
    await bench.answer(ITEM, max_tokens=8)
    assert record.unavailable == {("vllm", 4): "the reward service is away"}


def judge_of(rewards: Any) -> answer.Judge:
    async def judge(prompt: Prompt, text: str) -> tuple[float, float]:
        scores = await rewards.score(prompt, [text], reward="r")
        return scores.values[0], scores.values[0]

    return judge


def answers(system: str, n: int, rewards: list[float], seconds: float = 2.0) -> list[Any]:
    of = {"system": system, "n": n, "seconds": seconds, "tokens": 100, "second_judge": -1.0}
    return [
        of | {"prompt_id": str(i), "reward": reward, "text": "three short words"}
        for i, reward in enumerate(rewards)
    ]


def test_points_are_means_over_prompts_with_their_intervals(tmp_path: Path) -> None:
    (point,) = points(pd.DataFrame(answers("vllm", 4, [0.1, 0.2, 0.3, 0.4, 0.5]))).to_dict(
        "records"
    )
    assert (point["prompts"], point["seconds"], point["tokens"], point["words"]) == (5, 2, 100, 3)
    assert (point["reward"], point["second_judge"]) == (0.3, -1.0)
    assert 0.1 <= point["reward_low"] < 0.3 < point["reward_high"] <= 0.5
    few = points(pd.DataFrame(answers("vllm", 4, [0.1, 0.2])))
    assert few.reward_low.isna().all()
    write_picture(tmp_path / "picture.svg", few, "two prompts")
    assert (tmp_path / "picture.svg").stat().st_size


def test_only_prompts_that_all_available_systems_answered_are_compared(tmp_path: Path) -> None:
    """Guards against a mean over the prompts before a failure beside one over all."""
    rows = [*answers("vllm", 4, [0.1, 0.2]), *answers("vllm", 8, [0.3]), *answers("own", 4, [1, 2])]
    record = Record(tmp_path / "answer.json", {"max_tokens": 8, "reward": "r"}, rows)
    assert {*record.compared().prompt_id} == {"0"}
    record.unavailable["vllm", 8] = "out of memory"
    assert {*record.compared().prompt_id} == {"0", "1"}
    assert common([False] * 5, pd.DataFrame(rows)).empty
    record.store()
    again = Record(tmp_path / "answer.json")
    again.resume({"max_tokens": 8, "reward": "r"})
    assert (again.answers, again.unavailable) == (rows, {})
    with pytest.raises(ValueError, match="another max_tokens: move it away"):
        Record(tmp_path / "answer.json").resume({"max_tokens": 16, "reward": "r"})


def test_differences_are_paired_by_prompt_with_the_largest_n_of_the_base() -> None:
    rows = [
        *answers("vllm", 4, [0.0] * 4),
        *answers("vllm", 64, [1.0, 2.0, 3.0, 4.0], seconds=8.0),
        *answers("specrej", 64, [1.5, 2.5, 3.5, 4.5][::-1])[::-1],
    ]
    less, own = differences(pd.DataFrame(rows)).to_dict("records")
    assert (less["system"], less["n"], less["base"]) == ("vllm", 4, "vllm n=64")
    assert (less["reward"], less["seconds_ratio"]) == (-2.5, 0.25)
    assert (own["reward"], own["prompts"]) == (0.5, 4)
    assert own["reward_low"] < 0.5 < own["reward_high"]
    assert differences(pd.DataFrame(answers("specrej", 4, [1.0]))).empty


def test_all_peers_have_an_engine() -> None:
    specs = answering(Path("model"), 1, 1, most=512)
    assert tuple(spec.name for spec in specs) == answer.PEERS
    assert [spec.name for spec in specs if "url" in spec.options] == ["its_hub"]
    assert specs[0].options["max_num_seqs"] == 512


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Services with toys, and no environments of peers."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", "toy")
    toys = [{"name": name, "kind": "toy"} for name in ("toy", "second")]
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", json.dumps(toys))
    monkeypatch.setattr("benchmarks.engines._PEERS", tmp_path)
    monkeypatch.setattr("benchmarks.engines._VLLM", tmp_path)
    monkeypatch.setattr(answer, "MODEL", Path("toy"))


@pytest.mark.e2e
@pytest.mark.usefixtures("toys")
def test_run_on_toys_ends_with_the_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The services of this project, and a peer whose environment does not exist."""
    systems = ",".join((*answer.OURS, "its_hub"))
    out = tmp_path / "answer_0.5"  # what follows the point stays
    given = (
        f"bench --prompts 1 --n 2,4 --max-tokens 32 --reward toy --systems {systems} --out {out}"
    )
    monkeypatch.setattr("sys.argv", given.split())
    with pytest.raises(SystemExit) as ended:
        answer.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert (result["prompts"], result["max_tokens"]) == (1, 32)
    cases = [(point["system"], point["n"]) for point in result["points"]]
    assert cases == [(name, n) for name in answer.OURS for n in (2, 4)]
    fewer, full = (result["points"][number] for number in (1, 5))
    assert 0 < fewer["tokens"] <= full["tokens"]
    assert fewer["reward"] == fewer["second_judge"] > 0  # two judges of one kind
    assert "its_hub n=2: vllm does not start" in printed
    assert list(result["unavailable"]) == ["its_hub n=2", "its_hub n=4"]
    stored = json.loads((tmp_path / "answer_0.5.json").read_text())
    assert len(stored["answers"]) == 6
    assert (tmp_path / "answer_0.5.svg").exists()
    monkeypatch.setattr("sys.argv", [*given.split(), "--systems", "specrej=2+5000"])
    with pytest.raises(SystemExit) as ended:
        answer.main()
    assert ended.value.code == 1
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["unavailable"]) == [
        "specrej n=5000"
    ]


@pytest.mark.e2e
@pytest.mark.usefixtures("toys")
def test_a_run_that_ends_early_reports_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C amid the second prompt, then a failure amid the third one, then the rest."""
    calls: list[tuple[int, int]] = []
    ours = answer._ours

    async def ends_early(*arguments: Any) -> tuple[str, int]:
        *_, item, n, _ = arguments
        calls.append((item.number, n))
        if calls[1:] == [(0, 2), (0, 4), (1, 2), (1, 4)]:
            signal.raise_signal(signal.SIGINT)
        if calls[1:] == [(1, 4), (2, 2)]:
            raise ZeroDivisionError
        return await ours(*arguments)

    monkeypatch.setattr(answer, "_ours", ends_early)
    given = "--prompts 3 --max-tokens 8 --reward toy --systems specrej=2+4 --out"
    monkeypatch.setattr("sys.argv", ["bench", *given.split(), f"{tmp_path / 'answer'}"])
    ends: list[type[BaseException]] = [SystemExit, ZeroDivisionError, SystemExit]
    for num_prompts, exit_type in enumerate(ends, start=1):
        calls.clear()
        with pytest.raises(exit_type) as ended:
            answer.main()
        assert getattr(ended.value, "code", None) == {1: 130, 3: 0}.get(num_prompts)
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [point["prompts"] for point in result["points"]] == [num_prompts] * 2
        assert result["prompts"] == num_prompts
    assert calls[1:] == [(2, 2), (2, 4)]  # the first call warms up
    stored = json.loads((tmp_path / "answer.json").read_text())
    assert [(a["prompt_id"], a["n"]) for a in stored["answers"]] == [
        (item.id, n) for item in answer.read_items([DEFAULT_PROMPTS])[:3] for n in (2, 4)
    ]
    assert "date" in stored
