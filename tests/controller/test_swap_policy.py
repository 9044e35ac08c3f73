"""Who makes room for whom, and whose turn it is: the rules over plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swap_simulation import group

from kvelastic.controller.models.admission import Admission, Claim, Device, Model, Stand
from kvelastic.controller.models.swap_policy import Decision, Want, decide
from kvelastic.controller.settings.settings import GroupSettings

GIB = 1 << 30
GPU = "default/gpu0"


def model(name: str, needs: int = 8, least: int = 0, **more: Any) -> Model:
    """One that needs so many GiB reserved and guaranteed of a GPU."""
    return Model(name, {GPU: Claim(needs * GIB, least * GIB)}, **more)


def admission(
    capacity: int = 24,
    others: dict[str, int] | None = None,
    groups: dict[str, GroupSettings] | None = None,
) -> Admission:
    held = {name: Claim(count * GIB) for name, count in (others or {}).items()}
    return Admission({GPU: Device(capacity * GIB, others=held)}, groups or {})


def there(*models: Model) -> dict[str, Model]:
    return {one.name: one for one in models}


def decide_for(
    coming: Model, *present: Model, where: Admission | None = None, **want: Any
) -> Decision:
    models = {**there(*present), coming.name: replace(coming, stand=Stand.AWAY)}
    return decide(where or admission(), models, [Want(coming.name, 1, **want)])


def test_model_that_fits_wakes_immediately() -> None:
    assert decide_for(model("c"), model("a"), model("b")).go == ["c"]


def test_lowest_priority_longest_idle_model_is_displaced() -> None:
    present = (
        model("precious", priority=5, idle_s=900),
        model("idle", idle_s=60),
        model("idler", idle_s=600),
    )
    decision = decide_for(model("c"), *present)
    assert (decision.sleep, decision.go) == (["idler"], [])


def test_unneeded_displacement_is_avoided() -> None:
    """The small one is idler, and too small to help; once the large one goes it may stay."""
    present = (model("small", 4, idle_s=900), model("large", 16, idle_s=10))
    assert decide_for(model("c", 16), *present).sleep == ["large"]


def test_busy_model_yields_after_its_requests() -> None:
    present = (model("b", 8, is_busy=True, priority=-1, idle_s=9), model("a", 16, is_busy=True))
    decision = decide_for(model("c", 16), *present)
    assert (decision.sleep, decision.yielding) == ([], {"a"})
    assert "a ends its requests first" in decision.waits["c"].why


def test_busy_model_of_higher_priority_does_not_yield() -> None:
    decision = decide_for(model("c"), model("a", 24, is_busy=True, priority=1))
    assert (decision.sleep, decision.yielding) == ([], set())
    assert "more important" in decision.waits["c"].why


def test_displacement_waits_for_min_awake() -> None:
    present = (model("a", 12, stays_s=7.0), model("b", 12, stays_s=3.0, is_busy=True))
    decision = decide_for(model("c"), *present)
    assert (decision.sleep, decision.yielding) == ([], set())
    assert decision.look_again_in_s in {3.0, 7.0}
    assert "not to make room" in decision.waits["c"].why


def test_models_in_use_are_spared_for_a_while() -> None:
    present = (model("a", 12, is_in_use=True), model("b", 12, is_in_use=True, is_busy=True))
    decision = decide_for(model("c"), *present, spares_s=4.0)
    assert (decision.sleep, decision.yielding, decision.look_again_in_s) == ([], set(), 4.0)
    idle = model("idle", 12, priority=1)
    assert decide_for(model("c"), present[0], idle, spares_s=4.0).sleep == ["idle"]


def test_model_that_never_fits_is_refused_naming_holders() -> None:
    pinned = model("pinned", 12, can_leave=False)
    decision = decide_for(model("c", 16), pinned, model("idle", 8))
    assert decision.sleep == []
    assert "pinned has 12.00 GiB reserved" in decision.refused["c"]
    assert "idle" not in decision.refused["c"]
    decision = decide_for(model("c", 16), where=admission(others={"outsider": 10}))
    assert "outsider has 10.00 GiB reserved" in decision.refused["c"]
    assert "24.00 GiB" in decide_for(model("c", 30)).refused["c"]


def test_only_guarantees_count_against_room() -> None:
    assert decide_for(model("c", 8, 4), model("a", 8, 4)).go == ["c"]
    assert decide_for(model("c", 8, 4), model("a", 8, 6)).sleep == ["a"]


def test_room_promised_to_a_model_is_not_reused() -> None:
    """Of two that start at once each finds room for one."""
    a, b = model("a", 16), model("b", 16)
    models = {one.name: replace(one, stand=Stand.AWAY) for one in (a, b)}
    decision = decide(admission(), models, [Want("b", 2), Want("a", 1)])
    assert decision.go == ["a"]
    assert decision.sleep == []
    models["a"] = replace(a, stand=Stand.COMING)
    assert decide(admission(), models, [Want("b", 2)]).go == []


def test_smaller_model_does_not_overtake_a_waiting_one() -> None:
    busy, large, small = model("busy", 16, is_busy=True), model("large", 16), model("small", 8)
    models = {
        **there(busy),
        "large": replace(large, stand=Stand.AWAY),
        "small": replace(small, stand=Stand.AWAY),
    }
    decision = decide(admission(), models, [Want("large", 1), Want("small", 2)])
    # It fits beside what is there now, and beside the large one when that has come.
    assert decision.go == ["small"]
    small = model("small", 9)
    models["small"] = replace(small, stand=Stand.AWAY)
    assert decide(admission(25), models, [Want("large", 1), Want("small", 2)]).go == ["small"]
    assert decide(admission(24), models, [Want("large", 1), Want("small", 2)]).go == []


def test_request_priority_is_compared_before_model_priority() -> None:
    one, two, three = model("one", 24), model("two", 24, priority=3), model("three", 24)
    models = {m.name: replace(m, stand=Stand.AWAY) for m in (one, two, three)}
    wants = [Want("one", 1), Want("two", 2), Want("three", 3, priority=9)]
    assert decide(admission(), models, wants).go == ["three"]
    assert decide(admission(), models, wants[:2]).go == ["two"]


def test_model_going_to_sleep_prevents_further_displacement() -> None:
    models = {
        "a": replace(model("a", 12), stand=Stand.GOING),
        "b": replace(model("b", 12), stand=Stand.THERE),
        "c": replace(model("c", 12), stand=Stand.AWAY),
    }
    decision = decide(admission(), models, [Want("c", 1)])
    assert (decision.go, decision.sleep) == ([], [])
    assert decision.waits["c"].leavers == ("a",)


def test_preload_displaces_no_model() -> None:
    decision = decide_for(model("c"), model("a", 24), may_displace=False)
    assert (decision.sleep, decision.go) == ([], [])
    assert "c" in decision.refused


def test_number_of_concurrent_starts_is_limited() -> None:
    models = {n: model(n, 1, stand=Stand.AWAY, is_starting=True) for n in "abc"}
    wants = [Want(name, number, is_start=True) for number, name in enumerate(models)]
    assert decide(admission(), models, wants, starts_at_once=2).go == ["a", "b"]
    models["a"] = replace(models["a"], stand=Stand.COMING)
    assert decide(admission(), models, wants[1:], starts_at_once=2).go == ["b"]


def test_group_at_once_limits_awake_models() -> None:
    groups = {"g": group(at_once=1)}
    a, b, out = model("a", 1, group="g"), model("b", 1, group="g"), model("out", 1, idle_s=99)
    assert decide_for(b, a, out, where=admission(groups=groups)).sleep == ["a"]
    stuck = model("a", 1, group="g", can_leave=False)
    assert (
        "may be awake at once" in decide_for(b, stuck, where=admission(groups=groups)).refused["b"]
    )


def test_exclusive_group_displaces_others_except_persistent_and_pinned() -> None:
    groups = {"alone": group(exclusive=True), "always": group(persistent=True)}
    present = (
        model("out", 1),
        model("small", 1, group="always"),
        model("pinned", 1, can_leave=False),
    )
    coming = model("big", 1, group="alone")
    assert decide_for(coming, *present, where=admission(groups=groups)).sleep == ["out"]
    # And the other way round.
    big = model("big", 1, group="alone")
    assert decide_for(model("out", 1), big, where=admission(groups=groups)).sleep == ["big"]
    assert decide_for(
        model("small", 1, group="always"), big, where=admission(groups=groups)
    ).go == ["small"]


def test_overcommit_on_another_device_is_ignored() -> None:
    """Models that run when the controller starts may be more than a group or a device allows."""
    groups = {"g": group(at_once=1)}
    crowd = [model(name, 20, group="g") for name in "ab"]
    coming = Model("c", {"default/other": Claim(GIB)})
    assert decide_for(coming, *crowd, where=admission(groups=groups)).go == ["c"]
    assert sorted(decide_for(model("d", 20), *crowd, where=admission(groups=groups)).sleep) == [
        "a",
        "b",
    ]


sizes = st.integers(0, 12)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Admission, dict[str, Model], list[Want], int]:
    """Any number of models in any state, of which some want to wake."""
    groups = {
        "g": group(at_once=draw(st.integers(0, 2)), exclusive=draw(st.booleans())),
        "h": group(persistent=True),
    }
    models, wants = {}, []
    for number in range(draw(st.integers(1, 7))):
        stand = draw(st.sampled_from(Stand))
        one = model(
            f"m{number}",
            draw(sizes),
            draw(sizes) // 3,
            priority=draw(st.integers(-1, 1)),
            group=draw(st.sampled_from([None, "g", "h"])),
            can_leave=draw(st.booleans()),
            is_busy=stand is not Stand.THERE or draw(st.booleans()),
            idle_s=draw(sizes),
            stays_s=draw(st.sampled_from([0.0, 0.0, 5.0])),
            stand=stand,
        )
        models[one.name] = one
        if stand is Stand.AWAY and draw(st.booleans()):
            wants.append(Want(one.name, number, draw(st.integers(0, 1))))
    return (
        admission(others={"x": draw(sizes)}, groups=groups),
        models,
        wants,
        draw(st.integers(0, 2)),
    )


@pytest.mark.slow
@given(scenes())
def test_random_scenes_yield_valid_decisions(
    scene: tuple[Admission, dict[str, Model], list[Want], int],
) -> None:
    where, models, wants, starts = scene
    decision = decide(where, models, wants, starts)
    held = [m for m in models.values() if m.stand is not Stand.AWAY]
    for name in decision.go:
        assert where.obstacle(models[name], held) is None
        held.append(models[name])
    assert len(set(decision.sleep)) == len(decision.sleep)
    for name in decision.sleep:
        assert models[name].stand is Stand.THERE
        assert models[name].may_leave_now
    for name in decision.yielding:
        assert models[name].stand is Stand.THERE
        assert models[name].can_leave
        assert models[name].stays_s == 0
    told = [*decision.go, *decision.refused, *decision.waits]
    assert sorted(told) == sorted(want.name for want in wants), "each is told once"
    for name in decision.refused:
        stuck = [m for m in held if not m.can_leave and m.name not in decision.go]
        first = min(wants, key=lambda w: (-w.priority, -models[w.name].priority, w.number))
        if name == first.name:
            assert where.obstacle(models[name], stuck) is not None
