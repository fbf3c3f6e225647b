"""The comparison of answers: turns, unavailable systems, and runs on toys."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from benchmarks import answer
from benchmarks.answer import Record, common, differences, points, write_picture
from benchmarks.engines import Engine, WorkerError, WorkerProcess
from experiments.prompts import Item
from specrej import Prompt, Unavailable
from specrej.contracts import Scores

ITEM = Item("one", 0, Prompt.from_user("One?"))


def test_every_conversation_begins_with_a_system_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    own = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    }
    path.write_text(json.dumps(["Why?", own]))
    items = answer.read_items([path])
    assert [item.number for item in items] == [0, 1]
    systems = [item.prompt.turns[0] for item in items]
    assert systems[0] == answer.SYSTEM_TURN
    assert (systems[1].role, systems[1].content) == ("system", "Be brief.")


@dataclass
class Worker:
    """A double of a worker process: takes 100 s to start, and fails with 64 candidates."""

    clock: list[float]

    def ready(self) -> dict[str, str]:
        self.clock[0] += 100
        return {}

    def exchange(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        if "scores" in message:
            return {"text": "text", "tokens": 1}
        self.clock[0] += 1
        if message["n"] == 64:
            raise WorkerError("no answer in time")
        return {"score": ["text"]}

    def stop(self) -> None:
        pass


class Spec(Engine):
    """A double of a peer's engine."""

    def start(self, threads: int) -> WorkerProcess:
        return cast("WorkerProcess", Worker(self.options["clock"]))


class Rewards:
    """A double of the reward service: every score is 0.5, or the service is away."""

    def __init__(self, is_away: bool = False) -> None:
        self.is_away = is_away

    async def score(self, prompt: Prompt, texts: list[str], reward: str) -> Scores:
        if self.is_away:
            raise Unavailable("the reward service is away")
        return Scores((0.5,) * len(texts), 1)


def peer_of(clock: list[float], is_away: bool = False) -> answer.Peer:
    rewards: Any = Rewards(is_away)
    return answer.Peer(Spec("vllm", "", "", {"clock": clock}), rewards, "r", 60.0)


def judge_of(is_away: bool = False) -> answer.Judge:
    async def judge(prompt: Prompt, text: str) -> tuple[float, float]:
        scores = await Rewards(is_away).score(prompt, [text], reward="r")
        return scores.values[0], scores.values[0]

    return judge


async def test_starts_are_outside_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards peers against the seconds of a restart after a failure, which ends one case only."""
    clock = [0.0]
    monkeypatch.setattr("benchmarks.answer.time.perf_counter", lambda: clock[0])
    record = Record(Path())
    bench = answer.Bench({"vllm": peer_of(clock)}, [64, 4], judge_of(), record, settle_s=0.0)
    for number in range(2):
        await bench.answer(replace(ITEM, id=str(number)), max_tokens=8)
    assert record.unavailable == {("vllm", 64): "no answer in time"}
    assert [(given["n"], given["seconds"]) for given in record.answers] == [(4, 1)] * 2


@pytest.mark.parametrize("away", ["peer", "judge"])
async def test_a_failed_score_ends_one_case_only(away: str) -> None:
    """Guards hours of answers against one error of the reward service."""
    record, peer = Record(Path()), peer_of([0.0], away == "peer")
    bench = answer.Bench({"vllm": peer}, [4], judge_of(away == "judge"), record, settle_s=0.0)
    await bench.answer(ITEM, max_tokens=8)
    assert record.unavailable == {("vllm", 4): "the reward service is away"}


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


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Services with toys, and no environments of peers."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", "toy")
    toys = [{"name": name, "kind": "toy"} for name in ("toy", "second")]
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", json.dumps(toys))
    monkeypatch.setattr("benchmarks.engines._VLLM", tmp_path)
    monkeypatch.setattr(answer, "MODEL", Path("toy"))


@pytest.mark.e2e
@pytest.mark.usefixtures("toys")
def test_a_run_that_ends_early_reports_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C amid the second prompt, then the rest; the environment of vLLM does not exist."""
    calls: list[int] = []
    ours = answer.Ours.answer

    async def ends_early(self: answer.Ours, item: Item, n: int, tokens: int) -> tuple[str, int]:
        calls.append(item.number)
        if item.number == 1 and calls.count(1) == 1:
            signal.raise_signal(signal.SIGINT)
        return await ours(self, item, n, tokens)

    monkeypatch.setattr(answer.Ours, "answer", ends_early)
    out = tmp_path / "answer_0.5"  # what follows the point stays
    given = f"bench --prompts 2 --n 2 4 --max-tokens 8 --reward toy --out {out}"
    monkeypatch.setattr("sys.argv", given.split())
    for num_prompts, code in ((1, 130), (2, 0)):
        with pytest.raises(SystemExit) as ended:
            answer.main()
        assert ended.value.code == code
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        cases = {(point["system"], point["n"]): point for point in result["points"]}
        assert [*cases] == [(name, n) for name in answer.OURS for n in (2, 4)]
        assert {point["prompts"] for point in cases.values()} == {num_prompts}
        assert list(result["unavailable"]) == ["vllm n=2", "vllm n=4"]
    # Twice a warm-up of each system; no answer of the first prompt is repeated.
    assert (calls.count(0), calls.count(1)) == (6 + 6, 1 + 6)
    stored = json.loads((tmp_path / "answer_0.5.json").read_text())
    assert len(stored["answers"]) == 2 * 6
    assert (tmp_path / "answer_0.5.svg").exists()
