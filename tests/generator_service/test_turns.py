"""Turns of tenants: by weight over any time, and no pass is smaller for a tenant alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from generator_service.engine.commands import OpenCommand
from generator_service.engine.engine import Engine
from generator_service.turns import CREDIT, LEAST_ROWS, Turns
from tests.generator_service.stepping import ENDLESS, MODEL, Recorder, alone, opened, tokens_of

TENANTS = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.lists(st.integers(1, 64), min_size=1)),
    min_size=2,
    max_size=4,
)


class Served:
    """Tenants that always have all their units to give, within `most` rows of a pass."""

    def __init__(self, tenants: Sequence[tuple[float, Sequence[int]]], most: int = 10**9) -> None:
        self.tenants = tenants
        self.most = most
        self.turns = Turns()
        self.passes: list[list[int]] = []  # the tenant of each unit

    def serve(self, present: Sequence[int]) -> dict[int, float]:
        """One pass; the rows per weight of each tenant in it."""
        given_rows: list[tuple[int, int]] = []

        def units(tenant: int) -> Iterator[int]:
            for rows in self.tenants[tenant][1]:
                if not given_rows or sum(rows for _, rows in given_rows) + rows <= self.most:
                    given_rows.append((tenant, rows))
                    yield rows

        self.turns.take({str(t): (self.tenants[t][0], units(t)) for t in present})
        self.passes.append([tenant for tenant, _ in given_rows])
        return {
            t: sum(max(rows, LEAST_ROWS) for tenant, rows in given_rows if tenant == t) / weight
            for t, (weight, _) in enumerate(self.tenants)
        }


@given(tenants=TENANTS, most=st.sampled_from([16, 100, 10**9]), newcomer_after=st.integers(0, 20))
def test_tenants_with_work_are_served_by_weight(
    tenants: list[tuple[float, list[int]]], most: int, newcomer_after: int
) -> None:
    """In any window the rows per weight of two tenants differ by at most two units of each."""
    served = Served(tenants, most)
    everyone = range(len(tenants))
    for _ in range(newcomer_after):
        served.serve(everyone[1:])
    totals = [dict.fromkeys(everyone, 0.0)]
    for _ in range(60):
        rows = served.serve(everyone)
        totals.append({tenant: totals[-1][tenant] + rows[tenant] for tenant in everyone})
    unit = [max(LEAST_ROWS, *units) / weight for weight, units in tenants]
    for one in everyone:
        for other in everyone:
            lead = [total[one] - total[other] for total in totals]
            bound = 2 * (unit[one] + unit[other]) + (CREDIT if newcomer_after else 0)
            assert max(lead) - min(lead) <= bound + 1e-6


@given(units=st.lists(st.integers(1, 64), min_size=1), passes=st.integers(1, 5))
def test_a_tenant_alone_loses_nothing(units: list[int], passes: int) -> None:
    """Also while others, who have left, were served less."""
    served = Served([(1.0, units), (1.0, [1])])
    served.serve([0, 1])
    for _ in range(passes):
        served.serve([0])
        assert len(served.passes[-1]) == len(units)


def test_a_tenant_that_waited_has_little_credit() -> None:
    """Guards against a newcomer that takes all passes until it has caught up."""
    served = Served([(1.0, [16]), (1.0, [16])])
    for _ in range(100):
        served.serve([0])
    for _ in range(CREDIT // 16 + 2):
        served.serve([0, 1])
    assert [*map(sorted, served.passes[-2:])] == [[0, 1], [0, 1]]


def test_wide_sessions_take_no_passes_of_another_tenant() -> None:
    """Guards another tenant's latency against many cheap sessions of many candidates, and the
    tokens of all against the choice of passes."""
    model = Recorder(MODEL)
    engine = Engine(model, 50_000)
    prompts = [[1, *range(5, 21), number] for number in range(4)]
    wide = [opened(engine, OpenCommand(p, 24, ENDLESS, 8, cache_salt="wide")) for p in prompts]
    small = opened(engine, OpenCommand(prompts[0], 1, ENDLESS, 8, cache_salt="small"))
    rounds = {session: engine.extend(session.id, 24) for session in (*wide, small)}
    while not rounds[small].done():
        engine.step()
    decoded = [step.rows for step in model.passes if step.rows]
    assert max(map(sum, decoded)) <= 2 * 24 + 1
    assert sum(map(sum, decoded)) <= 24 * (LEAST_ROWS + 1) + 4 * 24
    assert sum(1 in rows for rows in decoded) == 23  # its first token is the prompt's
    while not all(future.done() for future in rounds.values()):
        engine.step()
    for session, prompt in zip(wide, prompts, strict=True):
        assert tokens_of(rounds[session].result()) == alone(prompt, 24)


def test_a_tenants_prompts_and_rounds_take_turns() -> None:
    """While another tenant has work, neither a tenant's prompts nor its rounds wait for ever."""
    model = Recorder(MODEL)
    engine = Engine(model, 50_000, prefill_chunk=16)
    busy = opened(engine, OpenCommand([1, 7], 1, ENDLESS, 8, cache_salt="busy"))
    engine.extend(busy.id, 24)
    grows = opened(engine, OpenCommand([1, 5], 16, ENDLESS, 8, cache_salt="both"))
    growing = engine.extend(grows.id, 24)
    for _ in range(3):
        engine.step()
    opened(engine, OpenCommand([1, *range(5, 90)], 1, ENDLESS, 8, cache_salt="both"))
    began = len(model.passes)
    for _ in range(16):
        engine.step()
    mine = [bool(step.num_prompt_tokens) for step in model.passes[began:]
            if step.num_prompt_tokens or len(step.rows) > 1 or step.rows == (16,)]  # fmt: skip
    assert not growing.done()
    assert [*map(int, mine)].count(1) >= 3
    assert all(first or second for first, second in pairwise(mine)), mine
    assert not all(mine)
