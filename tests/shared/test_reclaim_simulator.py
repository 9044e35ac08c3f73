"""The simulator of reclaim: what it prints, and rules of the policy that no trace may break."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.shared.liveness import ProcessIdentity, pid_namespace
from kvelastic.units import GIB_BYTES, MIB_BYTES
from tools import reclaim_simulator
from tools.reclaim_simulator import Contender, Depth, ReclaimRequest, kept_bytes, plan_reclaim
from tools.reclaim_simulator.__main__ import main
from tools.reclaim_simulator.account import Account
from tools.reclaim_simulator.examples import EXAMPLES, example_trace
from tools.reclaim_simulator.result import ModelResult, SimulationResult
from tools.reclaim_simulator.simulation import Simulation, simulate
from tools.reclaim_simulator.trace import (
    NS_PER_MS,
    Arrival,
    ModelSpec,
    Sleep,
    Trace,
    load_trace,
    parse_trace,
)

ROOT = Path(__file__).parents[2]
PAGE = 2 * MIB_BYTES
SECOND = 1000 * NS_PER_MS


def ms(value: float) -> int:
    return round(value * NS_PER_MS)


def run(*args: str) -> tuple[int, str, str]:
    """The command's exit code, standard output and standard error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def document(*arrivals: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A trace of two models, a and b, of 64 MiB; times may be left out."""
    made: dict[str, Any] = {
        "capacity": "64M",
        "models": [{"name": "a"}, {"name": "b"}],
        "arrivals": [{"at_ms": 0, "bytes": "2M", "hold_ms": 100} | one for one in arrivals],
    }
    return made | top


def replay(*arrivals: dict[str, Any], **top: Any) -> SimulationResult:
    return simulate(parse_trace(document(*arrivals, **top)))


# ------------------------------------------------------------------------------------ the policy


def holds(mib: int, **more: int) -> Contender:
    return Contender(granted_bytes=mib * MIB_BYTES, page_bytes=PAGE, **more)


def test_plan_matches_the_native_policy():
    requester = holds(0, request_bytes=30 * MIB_BYTES)
    idle = holds(40, parked_bytes=10 * MIB_BYTES, cached_bytes=30 * MIB_BYTES)
    idler = replace(idle, idle_ns=10 * reclaim_simulator.IDLE_NS)
    idle = replace(idle, idle_ns=reclaim_simulator.IDLE_NS)
    plan = plan_reclaim([requester, idle, idler], 0, 0, 80 * MIB_BYTES)
    assert plan == [
        ReclaimRequest(2, 20 * MIB_BYTES, Depth.CACHED),
        ReclaimRequest(1, 10 * MIB_BYTES, Depth.PARKED),
    ]


@pytest.mark.parametrize("requester", [-1, 1, 10])
def test_plan_with_invalid_requester_is_rejected(requester):
    with pytest.raises(InvalidArgumentError, match="1 contenders"):
        plan_reclaim([holds(0)], requester, 0, 0)


@pytest.mark.parametrize("free_bytes", [-1, 1 << 64])
def test_plan_with_invalid_bytes_is_rejected(free_bytes):
    with pytest.raises(InvalidArgumentError, match="free_bytes"):
        plan_reclaim([holds(0)], 0, free_bytes, 0)


@pytest.mark.parametrize("field", ["granted_bytes", "min_bytes", "idle_ns", "reclaim_ns"])
def test_contender_with_invalid_values_is_rejected(field):
    with pytest.raises(InvalidArgumentError, match=field):
        Contender(**{field: -1})
    with pytest.raises(InvalidArgumentError, match=field):
        Contender(**{field: 1 << 64})
    with pytest.raises(InvalidArgumentError, match="priority"):
        Contender(priority=1 << 63)


def test_memory_is_kept_for_the_earliest_request():
    early, late = holds(10, request_bytes=9, request_ns=2), holds(10, request_bytes=9, request_ns=1)
    assert kept_bytes([late, early], 0, 20) == 9
    assert kept_bytes([early, late], 0, 20) == 0
    assert kept_bytes([late, holds(10)], 0, 20) == 0  # it does not ask
    with pytest.raises(InvalidArgumentError):
        kept_bytes([late], 1, 20)
    with pytest.raises(InvalidArgumentError):
        kept_bytes([late], 0, -1)


@settings(max_examples=60)
@given(data=st.data())
def test_kept_bytes_match_the_real_ledger(data):
    """The simulator leaves to others what a member of a real ledger leaves to them."""
    unit = _vmm.GRANT_UNIT_BYTES
    capacity = 16
    me = ProcessIdentity.of_this_process()
    buffer = bytearray(_vmm.LEDGER_BYTES + 64)
    aligned = memoryview(buffer)[-_address(buffer) % 64 :][: _vmm.LEDGER_BYTES]
    _vmm.ledger_create(
        aligned,
        device="d",
        group="g",
        capacity_bytes=capacity * unit,
        uid=0,
        boot_id=bytes(16),
        created_realtime_ns=0,
    )
    mins = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8)))
    priorities = data.draw(st.tuples(st.integers(-1, 1), st.integers(-1, 1)))
    granted = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 7)))
    ask = data.draw(st.integers(1, 8))
    members = [
        _vmm.LedgerMember.join(
            aligned,
            name=name,
            uuid=bytes(16),
            pid=me.pid,
            start_time_ticks=me.start_time_ticks,
            pid_namespace=pid_namespace(),
            uid=0,
            min_bytes=least * unit,
            priority=priority,
        )
        for name, least, priority in zip("ab", mins, priorities, strict=True)
    ]
    for member, count in zip(members, granted, strict=True):
        assert member.grant(count, unit) == count
    members[0].request_memory(ask * unit)
    first, second = (
        Contender(granted_bytes=count * unit, min_bytes=least * unit, priority=priority)
        for count, least, priority in zip(granted, mins, priorities, strict=True)
    )
    free_bytes = (capacity - sum(granted)) * unit
    facts = [replace(first, request_bytes=ask * unit), second]
    kept = kept_bytes(facts, 1, capacity * unit)
    assert members[1].room(unit) == max(0, free_bytes - kept) // unit


def _address(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# ------------------------------------------------------------------------------ one alloc at a time


def test_free_memory_is_granted_without_reclaim():
    result = replay({"model": "a", "bytes": "40M"}, {"model": "b", "bytes": "24M"})
    assert [model.waits_ns for model in result.models] == [[0], [0]]
    assert result.moves == []
    assert result.models[0].peak_granted_bytes == 40 * MIB_BYTES


def test_only_idle_cache_is_reclaimed():
    fill = {"model": "a", "bytes": "64M", "cached": "64M"}
    want = {"model": "b", "bytes": "10M", "deadline_ms": 10}
    idle = replay(fill, want | {"at_ms": 601})  # 500 ms after it ended
    assert (idle.models[1].served, idle.models[0].cached_lost_bytes) == (1, 10 * MIB_BYTES)
    assert idle.models[1].got_bytes_from == {"a": 10 * MIB_BYTES}
    assert [move.depth for move in idle.moves] == [Depth.CACHED]
    assert idle.models[1].waits_ns == [ms(1)]  # the victim's give_back_ms
    busy = replay(fill, want | {"at_ms": 590})
    assert (busy.models[1].refused, busy.moved_bytes) == (1, 0)


def test_parked_pages_are_reclaimed_before_cached_ones():
    fill = {"model": "a", "bytes": "64M", "cached": "32M"}
    result = replay(fill, {"model": "b", "at_ms": 700, "bytes": "40M"})
    assert result.models[0].cached_lost_bytes == 8 * MIB_BYTES
    assert result.moved_bytes == 40 * MIB_BYTES


def test_own_cache_is_evicted_only_as_last_resort():
    fill = {"model": "a", "bytes": "32M", "cached": "32M"}
    more = {"model": "a", "at_ms": 700, "bytes": "32M"}
    alone = replay(fill, more, {"model": "b", "bytes": "32M", "hold_ms": 2000})
    assert alone.models[0].cached_evicted_bytes == 32 * MIB_BYTES
    shared = replay(fill, more, {"model": "b", "bytes": "32M", "cached": "32M"})
    assert shared.models[0].cached_evicted_bytes == 0
    assert shared.models[1].cached_lost_bytes == 32 * MIB_BYTES


def test_pressure_preempts_the_newest_request():
    models = [{"name": "a"}, {"name": "b", "priority": 1}]
    result = replay(
        {"model": "a", "bytes": "32M", "hold_ms": 3000, "count": 2, "every_ms": 1},
        {"model": "b", "at_ms": 1000, "bytes": "16M", "hold_ms": 1000},
        models=models,
    )
    a, b = result.models
    assert (a.served, a.preempted, b.served) == (2, 1, 1)
    # From 50 ms after the pressure (preempt_ms, and a look every 20 ms) b has it; a goes on then.
    assert ms(50) <= b.waits_ns[0] <= ms(90)
    assert a.waits_ns[0] == 0
    assert a.waits_ns[1] >= SECOND
    assert result.models[1].got_bytes_from == {"a": 16 * MIB_BYTES}


def test_request_ending_in_time_is_not_preempted():
    result = replay(
        {"model": "a", "bytes": "64M", "hold_ms": 1030},
        {"model": "b", "at_ms": 1000, "bytes": "16M"},
        models=[{"name": "a"}, {"name": "b", "priority": 1}],
    )
    assert result.models[0].preempted == 0
    assert result.models[1].waits_ns == [ms(30)]


def test_request_past_its_deadline_unblocks_the_queue():
    result = replay(
        {"model": "a", "bytes": "60M", "hold_ms": 5000},
        {"model": "b", "bytes": "32M", "at_ms": 1, "deadline_ms": 100},
        {"model": "b", "bytes": "4M", "at_ms": 2},
    )
    assert (result.models[1].refused, result.models[1].served) == (1, 1)
    assert result.models[1].waits_ns == [ms(99)]


def test_request_above_the_limit_is_refused_at_once():
    result = replay(
        {"model": "a", "bytes": "10M", "count": 4},
        {"model": "a", "bytes": "21M", "at_ms": 1},
        models=[{"name": "a", "limit": "20M"}, {"name": "b"}],
    )
    a = result.models[0]
    assert (a.served, a.refused, a.peak_granted_bytes) == (4, 1, 20 * MIB_BYTES)
    assert a.waits_ns == [0, 0, ms(100), ms(100)]


def test_late_counts_requests_served_after_the_bound():
    arrivals = ({"model": "a", "bytes": "64M", "count": 3},)
    assert replay(*arrivals, late_ms=100).models[0].late == 1
    assert replay(*arrivals, late_ms=99).models[0].late == 2


def test_idle_parked_pages_are_released():
    result = replay(
        {"model": "a", "bytes": "64M"},
        {"model": "b", "bytes": "64M", "at_ms": 11000},
    )
    assert result.moved_bytes == 0
    assert result.models[1].waits_ns == [0]


# ------------------------------------------------------------------------- reserve, sleep and wake

RESERVING = [{"name": "a"}, {"name": "b", "reserved": "24M", "asleep": True}]
FILL = {"model": "a", "bytes": "64M", "cached": "64M"}


def test_wake_reclaims_cache_for_its_reserve():
    """Also from a busy one of higher priority: who sleeps has a place, or is refused at once."""
    models = [RESERVING[0] | {"priority": 1}, RESERVING[1]]
    result = replay(FILL, {"model": "b", "at_ms": 110, "bytes": "4M"}, models=models)
    a, b = result.models
    assert (b.wakes_ns, b.wakes_refused, b.served) == ([ms(1)], 0, 1)
    assert a.cached_lost_bytes >= 24 * MIB_BYTES
    assert {move.requester for move in result.moves} == {1}


def test_reserved_memory_is_not_granted():
    awake = [RESERVING[0], RESERVING[1] | {"asleep": False}]
    result = replay(FILL | {"deadline_ms": 10}, FILL | {"bytes": "40M", "cached": 0}, models=awake)
    assert (result.models[0].refused, result.models[0].served) == (1, 1)
    assert result.models[0].peak_granted_bytes == 40 * MIB_BYTES
    # On the host reserves lie beside the capacity, as far as there is room.
    result = replay(FILL, models=awake, total="88M")
    assert result.models[0].peak_granted_bytes == 64 * MIB_BYTES


def test_sleeping_model_yields_guarantee_and_reserve():
    models = [RESERVING[0], RESERVING[1] | {"asleep": False, "min": "8M"}]
    top = {"models": models, "sleeps": [{"at_ms": 50, "model": "b"}]}
    result = replay(FILL | {"at_ms": 60}, **top)
    assert result.models[0].peak_granted_bytes == 64 * MIB_BYTES
    # While it has a request it stays awake; it sleeps when that has ended.
    working = {"model": "b", "bytes": "4M", "hold_ms": 500}
    result = replay(working, FILL | {"at_ms": 60}, **top)
    assert result.models[0].waits_ns == [ms(440)]


def test_wake_exceeding_the_capacity_is_refused_at_once():
    models = [RESERVING[0] | {"min": "41M"}, RESERVING[1]]
    request = {"model": "b", "at_ms": 10, "bytes": "4M", "deadline_ms": 1000}
    result = replay(FILL, request, request | {"at_ms": 20}, models=models)
    b = result.models[1]
    assert (b.wakes_ns, b.wakes_refused, b.served, b.refused) == ([], 2, 0, 2)
    assert result.moves == []


def test_unsatisfied_wake_is_withdrawn_and_may_be_retried():
    models = [RESERVING[0] | {"give_back_ms": 20_000}, RESERVING[1], {"name": "c"}]
    request = {"model": "b", "at_ms": 1000, "bytes": "4M", "deadline_ms": 6000}
    late = {"model": "c", "at_ms": 6500, "bytes": "2M", "deadline_ms": 30_000}
    again = request | {"at_ms": 35_000}
    result = replay(FILL, request, late, again, models=models)
    _, b, c = result.models
    assert (b.wakes_refused, b.wakes_ns) == (1, [0])  # by then it had been given back
    # The claim was withdrawn after five seconds, so what c waits for is not b's any more.
    assert c.served == 1


def test_first_of_two_wakes_gets_the_memory():
    models = [{"name": name, "reserved": "40M", "asleep": True} for name in "ab"]
    result = replay(*({"model": name, "bytes": "2M"} for name in "ab"), models=models)
    assert [len(model.wakes_ns) for model in result.models] == [1, 0]
    assert [model.wakes_refused for model in result.models] == [0, 1]


def test_even_split_includes_reserves_and_disables_sleep():
    trace = parse_trace(document({"model": "b"}, models=RESERVING, total="80M"))
    split = trace.split_evenly()
    assert [model.limit_bytes for model in split.models] == [32 * MIB_BYTES, 16 * MIB_BYTES]
    assert simulate(split).models[1].wakes_ns == []


# ------------------------------------------------------------------------------------- properties


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small devices and hard times: several models, all sizes of page, slow victims, guarantees."""
    count = draw(st.integers(1, 4))
    capacity = draw(st.integers(8, 40)) * PAGE
    beside = draw(st.sampled_from([0, 0, PAGE, 10 * PAGE]))
    models = []
    for i in range(count):
        page = draw(st.sampled_from([PAGE // 32, PAGE // 2, PAGE, 2 * PAGE, 3 * PAGE]))
        models.append(
            ModelSpec(
                name=f"m{i}",
                min_bytes=draw(st.integers(0, capacity // count // 2)),
                reserved_bytes=draw(st.just(0) | st.integers(0, capacity // count // 2)),
                is_asleep=draw(st.booleans()),
                limit_bytes=draw(st.none() | st.integers(0, capacity)),
                priority=draw(st.integers(-1, 1)),
                page_bytes=page,
                give_back_ns=ms(draw(st.sampled_from([0.1, 1, 15, 40, 700]))),
                preempt_ns=ms(draw(st.sampled_from([0, 50, 10_000]))),
            )
        )
    arrivals = []
    for _ in range(draw(st.integers(1, 30))):
        size = draw(st.integers(1, capacity))
        arrivals.append(
            Arrival(
                at_ns=ms(draw(st.integers(0, 4000))),
                model=draw(st.integers(0, count - 1)),
                bytes=size,
                hold_ns=ms(draw(st.integers(0, 1500))),
                cached_bytes=draw(st.integers(0, size)),
                deadline_ns=ms(draw(st.sampled_from([0, 100, 1000, 10_000]))),
            )
        )
    arrivals.sort(key=lambda arrival: arrival.at_ns)
    times = draw(st.lists(st.tuples(st.integers(0, 6000), st.integers(0, count - 1)), max_size=6))
    # Those who sleep at the start may ask for more than all the others leave.
    greedy = draw(st.booleans())
    models = [
        replace(spec, min_bytes=draw(st.integers(0, capacity)))
        if spec.is_asleep and greedy
        else spec
        for spec in models
    ]
    return Trace(
        capacity,
        tuple(models),
        tuple(arrivals),
        alloc_wait_ns=ms(draw(st.sampled_from([0, 50, 1000]))),
        total_bytes=capacity + beside if beside else 0,
        sleeps=tuple(Sleep(ms(at_ms), model) for at_ms, model in sorted(times)),
    )


class Watch:
    """Looks after every step at what the simulator's own checks cannot see."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.moves = 0

    def __call__(self, simulation: Simulation) -> None:
        held = [one.granted_bytes for one in simulation.instances]
        trace = simulation.trace
        awake = [one.spec for one in simulation.instances if not one.asleep]
        beside = max(0, trace.total_bytes - trace.capacity_bytes)
        left = trace.capacity_bytes
        left -= max(0, sum(spec.reserved_bytes for spec in awake) - beside)
        assert sum(held) <= left, "grants and reserves"
        assert sum(spec.min_bytes for spec in awake) <= left, "guarantees"
        moves = simulation.result.moves[self.moves :]
        self.moves += len(moves)
        for move in moves:
            spec = simulation.trace.models[move.victim]
            assert self.held[move.victim] > spec.min_bytes, "it had no more than its min"
            assert move.victim != move.requester
        for i in {move.victim for move in moves}:
            # It may have taken memory again in the same step, but never lost what is guaranteed.
            one = simulation.instances[i]
            assert one.asleep or held[i] >= min(one.spec.min_bytes, self.held[i])
        self.held = held


@pytest.mark.slow
@settings(max_examples=150)
@given(trace=traces())
def test_random_trace_keeps_the_invariants(trace):
    """Nothing is granted twice, nobody is taken below its min, every request comes to an end."""
    result = simulate(trace, Watch())
    for i, model in enumerate(result.models):
        assert model.requests == sum(arrival.model == i for arrival in trace.arrivals)
        assert model.served + model.refused == model.requests
        assert len(model.waits_ns) == model.served
        assert model.late <= model.served
        assert model.peak_granted_bytes <= trace.limit_bytes(i)
        assert model.name not in model.got_bytes_from
        if not trace.models[i].is_asleep and not trace.sleeps:
            assert (model.wakes_ns, model.wakes_refused) == ([], 0)
    assert result.moved_bytes == sum(sum(m.got_bytes_from.values()) for m in result.models)


@pytest.mark.slow
@settings(max_examples=30)
@given(trace=traces())
def test_simulation_is_deterministic(trace):
    assert simulate(trace) == simulate(trace)


@pytest.mark.slow
@settings(max_examples=40)
@given(trace=traces())
def test_evenly_split_models_never_reclaim(trace):
    result = simulate(trace.split_evenly(), Watch())
    assert result.moves == []
    assert sum(model.preempted for model in result.models) == 0


@pytest.mark.slow
@settings(max_examples=60)
@given(trace=traces())
def test_lower_priority_never_preempts_a_higher_one(trace):
    """But for a guarantee or a reserve, and there is none here."""
    models = tuple(replace(model, min_bytes=0, reserved_bytes=0) for model in trace.models)
    for move in simulate(replace(trace, models=models), Watch()).moves:
        victim, requester = models[move.victim], models[move.requester]
        assert move.depth is not Depth.IN_USE or victim.priority <= requester.priority


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2, 3])
@settings(max_examples=9)
@given(pages=st.integers(1, 16), count=st.integers(1, 12), hold_ms=st.integers(50, 2000))
def test_high_priority_is_served_almost_as_if_alone(pages, count, hold_ms, others):
    """But for the time that others take to make way."""
    first = [
        {"model": "top", "at_ms": 3000, "bytes": pages * PAGE, "hold_ms": hold_ms, "count": count}
    ]
    # All together twelve requests, of which four have the whole device.
    of_crowd = {"bytes": 8 * PAGE, "hold_ms": 4000, "count": 12 // others, "every_ms": 10}
    crowd = [{"model": f"m{i}", **of_crowd} for i in range(others)]
    models = [{"name": "top", "priority": 1}]
    alone = replay(*first, models=models)
    crowded = replay(*first, *crowd, models=models + [{"name": f"m{i}"} for i in range(others)])
    assert crowded.models[0].served == alone.models[0].served == count
    # To make way: 1 ms, 50 ms to the preemption, and then 20 ms for each of at most 4 requests.
    most_ms = 1 + 50 + 20 * (4 + 1)
    waits = zip(crowded.models[0].waits_ns, alone.models[0].waits_ns, strict=True)
    for before, (together_ns, alone_ns) in enumerate(waits):
        assert together_ns <= alone_ns + (before + 1) * ms(most_ms)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    models=st.integers(2, 4),
    pages=st.integers(1, 8),
    hold_ms=st.integers(100, 3000),
    step_ms=st.integers(10, 400),
)
def test_no_equal_starves(models, pages, hold_ms, step_ms):
    """Everybody always has work; nobody waits for a first page much longer than for its turn."""
    names = [f"m{i}" for i in range(models)]
    arrivals = [
        {
            "model": name,
            "at_ms": i,
            "bytes": pages * PAGE,
            "hold_ms": hold_ms,
            "count": 30,
            "every_ms": step_ms,
            "deadline_ms": 3_600_000,
        }
        for i, name in enumerate(names)
    ]
    result = replay(*arrivals, models=[{"name": name} for name in names])
    assert [model.served for model in result.models] == [30] * models
    at_once = max(1, 32 // models // pages)  # requests in an equal share
    turn_ms = hold_ms * (30 / at_once + 1)
    # In use goes after 2 s at the latest, and what was preempted begins again.
    most_ms = 3 * (turn_ms + 2000 + hold_ms) + 30 * 200
    assert max(max(model.waits_ns) for model in result.models) <= ms(most_ms)


def busy_pair(size: str, hold_ms: int, cached: str, count: int) -> dict[str, Any]:
    return document(
        *(
            {
                "model": name,
                "at_ms": 300 * i,
                "bytes": size,
                "hold_ms": hold_ms,
                "cached": cached,
                "count": count,
                "every_ms": 100,
                "deadline_ms": 3_600_000,
            }
            for i, name in enumerate("ab")
        ),
        capacity="4G",
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(hold_ms=st.integers(100, 300), count=st.integers(50, 250))
def test_two_busy_models_settle(hold_ms, count):
    """Both cache all they can; however long it goes on, no more moves than their shares differ."""
    result = simulate(parse_trace(busy_pair("128M", hold_ms, "128M", count)))
    assert result.moved_bytes <= 2 * GIB_BYTES
    assert sum(model.refused + model.late for model in result.models) == 0


@pytest.mark.slow
def test_two_saturated_models_settle():
    result = simulate(parse_trace(busy_pair("1000M", 5000, "0", 12)))
    assert result.moved_bytes <= 4 * GIB_BYTES


# --------------------------------------------------------------------------------------- examples


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_valid_trace_and_replays(name, tmp_path):
    code, out, _ = run("--example", name, "--print-example")
    path = tmp_path / "trace.json"
    path.write_text(out)
    assert code == 0
    assert load_trace(path) == example_trace(name)
    code, out, _ = run("--example", name)
    assert code == 0
    for model in example_trace(name).models:
        assert re.search(rf"^\|{re.escape(model.name)} +\| shared", out, re.MULTILINE)
    assert EXAMPLES[name].what in out
    assert name in (ROOT / "docs" / "reclaim.md").read_text()


def example(name: str) -> tuple[SimulationResult, SimulationResult]:
    trace = example_trace(name)
    return simulate(trace, Watch()), simulate(trace.split_evenly(), Watch())


def wait_ns(model: ModelResult, percent: int) -> int:
    waited_ns = model.wait_ns(percent)
    assert waited_ns is not None
    return waited_ns


def test_sharing_serves_bursts_better_than_splitting():
    shared, split = example("bursts")
    assert sum(model.late for model in shared.models) == 0
    assert all(model.late > 20 for model in split.models)
    assert all(model.peak_granted_bytes > 4 * GIB_BYTES for model in shared.models)


def test_priority_preempts_promptly_and_refuses_no_request():
    shared, _ = example("priority")
    chat, batch = shared.models
    assert wait_ns(chat, 99) <= ms(100)
    assert (chat.late, chat.refused, batch.refused) == (0, 0, 0)
    assert batch.preempted > 0


@pytest.mark.slow
def test_two_busy_models_do_not_exchange_pages_repeatedly():
    shared, _ = example("two-busy")
    assert shared.moved_bytes < 2 * GIB_BYTES
    busy_till_ns = 60 * SECOND  # b ends a second after a, which is idle then
    assert [m for m in shared.moves if 10 * SECOND < m.at_ns < busy_till_ns] == []


@pytest.mark.slow
def test_equals_have_similar_waits():
    shared, _ = example("equals")
    assert [model.served for model in shared.models] == [60] * 4
    waits = [wait_ns(model, 99) for model in shared.models]
    assert max(waits) < 2 * min(waits)


def test_reserve_is_immediate_on_wake_and_shared_asleep():
    shared, split = example("wakes")
    busy, rare = shared.models
    assert rare.wakes_ns == [ms(1), ms(1)]
    assert (busy.refused, busy.late, rare.refused, rare.wakes_refused) == (0, 0, 0, 0)
    assert busy.peak_granted_bytes == 7 * GIB_BYTES
    assert busy.cached_evicted_bytes + busy.cached_lost_bytes < split.models[0].cached_evicted_bytes


def test_slow_victim_delays_only_by_the_patience():
    shared, _ = example("slow-victim")
    busy = shared.models[0]
    assert busy.got_bytes_from == {"idle": 2 * GIB_BYTES}
    assert max(busy.waits_ns) == reclaim_simulator.PATIENCE_NS + ms(1)


# -------------------------------------------------------------------------------------- the trace


def documented_trace() -> dict[str, Any]:
    (block,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/reclaim.md").read_text(), re.DOTALL)
    made: dict[str, Any] = json.loads(block)
    return made


def test_documented_trace_replays_and_has_every_key():
    trace = parse_trace(documented_trace())
    assert len(trace.arrivals) == 9
    assert trace.models[0] == ModelSpec(
        "chat", min_bytes=GIB_BYTES, limit_bytes=6 * GIB_BYTES, priority=10, page_bytes=PAGE
    )
    assert (trace.models[1].reserved_bytes, trace.sleeps) == (GIB_BYTES, (Sleep(ms(6000), 1),))
    assert sum(model.served for model in simulate(trace).models) == 9
    table = (ROOT / "docs/reclaim.md").read_text().rpartition("| key |")[2]
    sleeps = documented_trace()["sleeps"]
    objects = [documented_trace(), *documented_trace()["models"], *sleeps]
    for key in (key for one in objects for key in one):
        assert key in table, key


def test_documented_times_match_the_policy():
    text = (ROOT / "docs/reclaim.md").read_text()
    for name in (
        "idle",
        "patience",
        "fair_cached",
        "fair_in_use",
        "request_expiry",
        "reserve_wait",
    ):
        time_ns = getattr(reclaim_simulator, f"{name.upper()}_NS")
        assert re.search(rf"^\| {time_ns // NS_PER_MS} ms .*\| `{name}_ns` \|$", text, re.MULTILINE)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.pop(key)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value that comes last at the path before it."""
    *where, key, value = path

    def change(made: dict[str, Any]) -> None:
        at: Any = made
        for step in where:
            at = at[step]
        at[key] = value

    return change


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no capacity": (without("capacity"), "the trace: the key 'capacity' is missing"),
    "no models": (without("models"), "the key 'models' is missing"),
    "an unknown key": (put("capcity", 1), "unknown key 'capcity'"),
    "an unknown key inside": (put("models", 0, "prio", 1), r"models\[0\]: unknown key 'prio'"),
    "no capacity at all": (put("capacity", 0), "capacity must be more than 0"),
    "a bad size": (put("capacity", "8X"), "the trace: capacity: size '8X' is not understood"),
    "a negative size": (put("models", 0, "min", -1), r"models\[0\]: min: size '-1'"),
    "a size of true": (put("capacity", True), "capacity: must be a size"),
    "a part of a byte": (put("capacity", 1.5), "capacity: must be a size"),
    "models of no list": (put("models", {}), "models: must be a list"),
    "no model": (
        lambda made: made.update(models=[], arrivals=[], sleeps=[]),
        "there must be 1 to 128 models",
    ),
    "a model that is none": (put("models", 0, "a"), r"models\[0\]: must be an object"),
    "a model twice": (
        lambda made: made.update(models=[{"name": "chat"}] * 2, arrivals=[], sleeps=[]),
        "two models are called 'chat'",
    ),
    "a victim that takes no time": (put("models", 0, "give_back_ms", 0), "at least 0.1"),
    "a name of no text": (put("models", 0, "name", 7), "name: must be a printable text"),
    "a name that moves the cursor": (put("models", 0, "name", "\x1b[2J"), "printable text"),
    "too much guaranteed": (put("models", 0, "min", "9G"), "add up to 9.00 GiB, more than"),
    "too much reserved": (
        put("models", 0, "reserved", "7.5G"),
        "add up to 1.00 GiB and what they have reserved to 7.50 GiB, more than the capacity",
    ),
    "less in total than there is": (put("total", "7G"), "total must not be less"),
    "a sleep of nobody": (put("sleeps", [{"at_ms": 1, "model": "x"}]), r"sleeps\[0\]: model: no"),
    "a sleep that lasts": (
        put("sleeps", [{"at_ms": 1, "model": "chat", "to_ms": 2}]),
        r"sleeps\[0\]: unknown key 'to_ms'",
    ),
    "asleep or not": (put("models", 0, "asleep", 1), "asleep: must be true or false"),
    "a page of part of a unit": (put("models", 0, "page", 1000), "multiple of 64.00 KiB"),
    "no page": (put("models", 0, "page", 0), "multiple of 64.00 KiB"),
    "a priority out of bounds": (put("models", 0, "priority", 1001), "from -1000 to 1000"),
    "a limit of null": (put("models", 0, "limit", None), "limit: must be a size"),
    "an unknown model": (put("arrivals", 0, "model", "x"), r"arrivals\[0\]: model: no model is"),
    "a time of the past": (put("arrivals", 0, "at_ms", -1), "at_ms: must be 0 to"),
    "a time without end": (put("arrivals", 0, "at_ms", float("inf")), "at_ms: must be 0 to"),
    "no time": (put("arrivals", 0, "hold_ms", float("nan")), "hold_ms: must be 0 to"),
    "a huge time": (put("arrivals", 0, "hold_ms", 10**400), "hold_ms: must be 0 to"),
    "a time of text": (put("arrivals", 0, "hold_ms", "9"), "must be a number of milliseconds"),
    "a request of nothing": (put("arrivals", 0, "bytes", 0), "bytes: must be more than 0"),
    "too much cached": (put("arrivals", 0, "cached", "3G"), "cached: must not be more than bytes"),
    "no request at all": (put("arrivals", 0, "count", 0), "count: must be a whole number from 1"),
    "too many requests": (put("arrivals", 0, "count", 100_000), "more than 100000 requests"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_invalid_trace_prints_one_line_and_exits_2(case, tmp_path):
    change, message = WRONG[case]
    made = documented_trace()
    made["arrivals"].reverse()  # so that the first one has no count yet
    change(made)
    with pytest.raises(InvalidArgumentError, match=message):
        parse_trace(made)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(made))
    code, out, err = run(str(path))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"Error: .*\n", err), err
    assert str(path) in err
    assert re.search(message, err)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"capacity": ' + b"9" * 5000 + b"}",
        b"[]",
    ],
)
def test_unreadable_trace_prints_one_line_and_exits_2(content, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    code, out, err = run(str(path))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"Error: .*\n", err), err


# -------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of the two"),
        (["trace.json", "--example", "bursts"], "one of the two"),
        (["--example", "no-such"], "invalid choice: 'no-such'"),
        (["--example", "bursts", "--capacity", "much"], "size 'much' is not understood"),
        (["--example", "bursts", "--capacity", "0"], "capacity must be more than 0"),
        (["--example", "priority", "--capacity", "512M"], "more than the capacity"),
        (["no-such-file.json"], "no-such-file.json: No such file or directory"),
        (["/"], "Is a directory"),
        (["trace.json", "--print-example"], "--print-example needs --example"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_wrong_usage_exits_2(args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_json_has_the_documented_keys(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(documented_trace()))
    code, out, _ = run(str(path), "--capacity", "4G", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["capacity_bytes"] == 4 * GIB_BYTES
    text = (ROOT / "docs/reclaim.md").read_text()
    for part in ("shared", "split"):
        assert [model["name"] for model in report[part]["models"]] == ["chat", "batch"]
        for key in [*report, *report[part], *report[part]["models"][0]]:
            assert f"`{key}`" in text or f'"{key}"' in text, key


def test_name_with_brackets_is_printed_unchanged(tmp_path):
    made = document({"model": "[red]x"}, models=[{"name": "[red]x"}])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(made))
    assert "|[red]x |" in run(str(path))[1]


# -------------------------------------------------------------------------- what the checks notice


def test_integrity_check_detects_excessive_grants():
    simulation = Simulation(parse_trace(document({"model": "a"})))
    simulation.check_integrity()
    simulation.instances[0].add(33)
    with pytest.raises(IntegrityError, match="grants add up"):
        simulation.check_integrity()


@pytest.mark.parametrize(
    ("method", "what"), [("has_room_for", "guarantees add up"), ("is_there", "grants add up")]
)
def test_integrity_check_detects_a_wake_without_memory(monkeypatch, method, what):
    monkeypatch.setattr(Account, method, lambda *_: True)
    models = [{"name": "a", "min": "50M"}, RESERVING[1] | {"min": "8M"}]
    if method == "is_there":
        models = RESERVING
    with pytest.raises(IntegrityError, match=what):
        replay(FILL, {"model": "b", "at_ms": 10}, models=models)


def test_integrity_check_detects_a_sleeper_with_pages():
    simulation = Simulation(parse_trace(document({"model": "b"}, models=RESERVING)))
    simulation.check_integrity()
    simulation.instances[1].add(1)
    with pytest.raises(IntegrityError, match="sleeps and holds 1"):
        simulation.check_integrity()


def test_integrity_check_detects_unowned_pages_in_use():
    simulation = Simulation(parse_trace(document({"model": "a"})))
    simulation.instances[0].in_use += 1
    with pytest.raises(IntegrityError, match="no request has"):
        simulation.check_integrity()


def test_plan_that_breaks_a_guarantee_is_detected(monkeypatch):
    """The simulator does not believe the policy: it checks what it says."""
    monkeypatch.setattr(
        "tools.reclaim_simulator.simulation.plan_reclaim",
        lambda *_: [ReclaimRequest(0, 64 * MIB_BYTES, Depth.IN_USE)],
    )
    with pytest.raises(IntegrityError, match="below the min"):
        replay(
            {"model": "a", "bytes": "64M"},
            {"model": "b", "at_ms": 1},
            models=[{"name": "a", "min": "2M"}, {"name": "b"}],
        )


def test_closed_output_pipe_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "tools.reclaim_simulator", "--example", "bursts", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE
