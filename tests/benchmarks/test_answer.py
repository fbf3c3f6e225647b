"""The comparison of answers: turns, statistics, and runs on toys."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from benchmarks import answer
from benchmarks.answer import Item, Record, differences, points, write_picture
from specrej import Client, Message, Prompt
from specrej.contracts import Scores

ITEM = Item("one", 0, Prompt.from_user("One?"))


def test_every_conversation_begins_with_a_system_turn(tmp_path: Path) -> None:
    path, own = tmp_path / "prompts.jsonl", Message("system", "Be brief.")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    lines = [{"id": "a", "prompt": "Why?"}, {"id": "b", "messages": turns}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    first, second = answer.read_items(path)
    assert first == Item("a", 0, Prompt((answer.SYSTEM_TURN, Message("user", "Why?"))))
    assert second == Item("b", 1, Prompt((own, Message("user", "How?"))))
    assert len(answer.read_items(answer.PROMPTS)) == 108


async def test_callers_share_the_items_and_each_answer_counts_once() -> None:
    most = running = 0

    async def counted(item: Item, n: int, max_tokens: int) -> answer.Answer:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return answer.Answer(str(item.number), max_tokens)

    async def judge(prompt: Prompt, text: str) -> tuple[float, float]:
        return float(text), 0.0

    record = Record(Path())
    bench = answer.Bench({"own": counted}, {"own": [2, 4]}, judge, record, settle_s=0.0)
    items = [ITEM._replace(number=number) for number in range(5)]
    await bench.under_load("own", items, 8, callers=3)
    (line,) = record.load
    assert (most, line["answers"], line["n"], line["callers"]) == (3, 5, 4, 3)
    assert line["reward"] == 2.0
    assert line["p95_s"] >= line["p50_s"] >= 0.0


async def test_the_best_text_of_the_peer_is_its_answer() -> None:
    """One request with n; the same reward service scores the texts."""
    sent: list[Any] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        choices = [{"message": {"content": text}} for text in ("bad", "good")]
        usage = {"completion_tokens": 7, "prompt_tokens": 5}
        return httpx.Response(200, json={"choices": choices, "usage": usage})

    class Rewards:
        async def score(self, prompt: Prompt, texts: list[str], reward: str) -> Scores:
            return Scores(tuple(float(text == "good") for text in texts), 1)

    rewards: Any = Rewards()
    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(transport=transport, base_url="http://peer") as http:
        assert await answer.ask_peer(http, rewards, "r", ITEM, 2, 8) == ("good", 7, 5)
    assert [sent[0][name] for name in ("n", "max_tokens", "seed")] == [2, 8, ITEM.number]


def answers(system: str, n: int, rewards: list[float], seconds: float = 2.0) -> list[Any]:
    of = {"system": system, "n": n, "seconds": seconds, "tokens": 100, "second_judge": -1.0}
    of["prefilled"] = 5
    return [
        of | {"prompt_id": str(i), "seed": i, "reward": reward, "text": "three short words"}
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


def test_only_prompts_that_all_systems_answered_are_compared(tmp_path: Path) -> None:
    """Guards against a mean over the prompts before an interruption beside one over all."""
    rows = [*answers("vllm", 4, [0.1, 0.2]), *answers("vllm", 8, [0.3]), *answers("own", 4, [1, 2])]
    record = Record(tmp_path / "answer.json", {"max_tokens": 8, "reward": "r"}, rows)
    assert {*record.compared().prompt_id} == {"0"}
    record.store()
    again = Record(tmp_path / "answer.json")
    again.resume({"max_tokens": 8, "reward": "r"})
    assert again.answers == rows
    with pytest.raises(ValueError, match="another max_tokens: move it away"):
        Record(tmp_path / "answer.json").resume({"max_tokens": 16, "reward": "r"})


def test_a_prompt_counts_once_with_the_mean_of_its_seeds(tmp_path: Path) -> None:
    first = [*answers("vllm", 4, [1.0, 2.0, 3.0, 4.0]), *answers("own", 4, [1.0, 2.0, 3.0, 4.0])]
    better = {"vllm": 1.0, "own": 0.0}
    second = [
        a | {"seed": a["seed"] + 100, "reward": a["reward"] + better[a["system"]]}
        for a in first[:5]
    ]
    record = Record(tmp_path / "answer.json", {}, [*first, *second])
    compared = record.compared()
    assert len(compared) == 10  # the first prompt twice, each by two systems
    theirs, own = points(compared).to_dict("records")
    assert (theirs["prompts"], theirs["reward"], own["reward"]) == (4, 2.625, 2.5)
    (difference,) = differences(compared).to_dict("records")
    assert (difference["prompts"], difference["reward"]) == (4, -0.125)


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
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services with toys."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", "toy")
    toys = [{"name": name, "kind": "toy"} for name in ("toy", "second")]
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", json.dumps(toys))


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.usefixtures("toys")
def test_a_run_that_ends_early_reports_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C amid the second prompt, then the rest."""
    calls: list[int] = []
    ours = answer.ask_services

    async def ends_early(
        client: Client, options: Any, reward: str, item: Item, n: int, tokens: int
    ) -> answer.Answer:
        calls.append(item.number)
        if item.number == 1 and calls.count(1) == 1:
            signal.raise_signal(signal.SIGINT)
        return await ours(client, options, reward, item, n, tokens)

    monkeypatch.setattr(answer, "ask_services", ends_early)
    out = tmp_path / "answer_0.5"  # what follows the point stays
    given = f"bench --prompts 2 --n 2 4 --max-tokens 8 --reward toy --out {out} --systems"
    monkeypatch.setattr("sys.argv", [*given.split(), *answer.OURS])
    for num_prompts, code in ((1, 130), (2, 0)):
        with pytest.raises(SystemExit) as ended:
            answer.main()
        assert ended.value.code == code
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        cases = {(point["system"], point["n"]): point for point in result["points"]}
        assert [*cases] == [(name, n) for name in answer.OURS for n in (2, 4)]
        assert {point["prompts"] for point in cases.values()} == {num_prompts}
    # Twice a warm-up of each system; no answer of the first prompt is repeated.
    assert (calls.count(0), calls.count(1)) == (6 + 6, 1 + 6)
    stored = json.loads((tmp_path / "answer_0.5.json").read_text())
    assert len(stored["answers"]) == 2 * 6
    assert (tmp_path / "answer_0.5.svg").exists()
