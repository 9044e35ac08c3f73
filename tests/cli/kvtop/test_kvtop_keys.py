"""What kvtop's keys do, with no terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import GIB, MANY, MIB, instance

from kvelastic.cli.kvtop.keys import Ask, Effect, Ui, found, press, selected_at, shown
from kvelastic.cli.kvtop.poller import answer_line
from kvelastic.cli.kvtop.scene import ORDERS, Instance
from kvelastic.cli.kvtop.text import UNICODE
from kvelastic.cli.kvtop.view import screen
from kvelastic.shared.segment import Ack

THREE = tuple(instance(name, model="") for name in "abc")


def press_all(
    keys: list[str] | str, instances: tuple[Instance, ...] = THREE, ui: Ui | None = None
) -> tuple[Ui, list[Effect]]:
    ui, effects = ui or Ui(), []
    for key in keys:
        ui, more = press(ui, key, instances)
        effects += more
    return ui, effects


def selected(ui: Ui, instances: tuple[Instance, ...] = THREE) -> str:
    rows = shown(ui, instances)
    return rows[selected_at(ui, rows)].name


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ([], "a"),
        (["j"], "b"),
        (["down", "down", "down", "down"], "c"),
        (["G", "k"], "b"),
        (["end", "up", "up", "up", "up"], "a"),
        (["page_down"], "c"),
        (["G", "g"], "a"),
    ],
)
def test_keys_select_an_instance(keys, name):
    ui, effects = press_all(keys)
    assert (selected(ui), effects) == (name, [])


def test_selection_follows_its_instance_when_sorted():
    ui, _ = press_all(["j", "r", "s", "s"])
    assert selected(ui) == "b"
    later = (instance("0"), *THREE)
    assert selected(found(ui, later), later) == "b"


def test_ended_selection_moves_to_the_next_instance():
    ui, _ = press_all(["j"])
    left = (THREE[0], THREE[2])
    ui = found(ui, left)
    assert selected(ui, left) == "c"
    assert selected_at(found(ui, ()), []) == 0


def test_sort_keys_cycle_both_ways():
    assert [press_all("s" * n)[0].order for n in range(len(ORDERS) + 1)] == [*ORDERS, ORDERS[0]]
    assert press_all("S")[0].order == ORDERS[-1]
    assert press_all("r")[0].is_reversed
    assert not press_all("rs")[0].is_reversed


def test_filter_follows_typing_and_escape_restores():
    ui, _ = press_all("/b")
    assert [one.name for one in shown(ui, THREE)] == ["b"]
    assert (ui.mode, selected(ui)) == ("filter", "b")
    kept, _ = press_all(["enter"], ui=ui)
    assert (kept.mode, kept.filter_text) == ("list", "b")
    undone, _ = press_all(["/", "x", "escape"], ui=kept)
    assert undone.filter_text == "b"
    assert press_all(["escape"], ui=kept)[0].filter_text == ""
    assert press_all(["/", "backspace", "backspace", "q"], ui=kept)[0].filter_text == "q"


@pytest.mark.parametrize(
    ("keys", "ask"),
    [
        ("l512M", Ask("a", "a", "limit", 512 * MIB)),
        ("jl25%", Ask("b", "b", "limit", 4 * GIB)),
        ("m0", Ask("a", "a", "min", 0)),
        ("p-12", Ask("a", "a", "priority", -12)),
    ],
)
def test_change_is_requested_after_confirmation(keys, ask):
    before, effects = press_all([*keys, "enter"])
    assert (before.mode, effects) == ("confirm", [])
    assert press_all(["x", "1", "enter"], ui=before) == (before, [])  # neither yes nor no
    ui, effects = press_all(["y"], ui=before)
    assert (ui.mode, effects) == ("list", [ask])
    assert "asking" in ui.message
    for no in ("n", "escape"):
        ui, effects = press_all([no], ui=before)
        assert (ui.mode, ui.message, effects) == ("list", "nothing was changed", [])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("l", "write a size"),
        ("lbanana", "write a size"),
        ("l-5", "write a size"),
        ("l101%", "0% to 100%"),
        ("m1.5.5G", "write a size"),
        ("phigh", "whole number"),
        ("p1.5", "whole number"),
        ("p99999999999999999999", "-1000 to 1000"),
        ("p1001", "-1000 to 1000"),
    ],
)
def test_invalid_input_is_reported_and_can_be_corrected(keys, problem):
    ui, effects = press_all([*keys, "enter"])
    assert (ui.mode, effects) == ("entry", [])
    assert problem in ui.problem
    ui, _ = press_all(["\x15", "7", "enter"], ui=ui)
    assert (ui.mode, ui.value, ui.problem) == ("confirm", 7, "")


def test_percentage_needs_a_known_capacity():
    ui, _ = press_all([*"l50%", "enter"], (instance("a", capacity_bytes=0),))
    assert "not known" in ui.problem


def test_target_stays_when_the_list_changes():
    ui, _ = press_all(["j", "l", "1", "G"])
    ui = found(ui, (THREE[0],))
    ui, effects = press_all(["enter", "y"], (THREE[0],), ui)
    assert effects == [Ask("b", "b", "limit", GIB)]


@pytest.mark.parametrize("key", "lzw")
def test_closing_instance_cannot_be_changed(key):
    ui, effects = press_all(key, (instance("a", state="closing"),))
    assert (ui.mode, effects) == ("list", [])
    assert "closing" in ui.message


@pytest.mark.parametrize(("key", "asleep", "verb"), [("z", False, "sleep"), ("w", True, "wake")])
def test_sleep_and_wake_are_requested_after_confirmation(key, asleep, verb):
    instances = (instance("a"), instance("b", asleep=asleep))
    before, effects = press_all(["j", key], instances)
    assert (before.mode, effects) == ("confirm", [])
    assert press_all(["x", "z", "w", "enter"], instances, before) == (before, [])
    ui, effects = press_all(["y"], instances, before)
    assert (ui.mode, effects) == ("list", [Ask("b", "b", "sleep", int(key == "z"))])
    assert ui.message == f"asking b for {verb}"
    for no in ("n", "escape"):
        ui, effects = press_all([no], instances, before)
        assert (ui.mode, ui.message, effects) == ("list", "nothing was changed", [])


@pytest.mark.parametrize(("key", "asleep"), [("z", True), ("w", False)])
def test_current_sleep_state_is_reported_without_a_request(key, asleep):
    ui, effects = press_all(key, (instance("a", asleep=asleep),))
    assert (ui.mode, effects) == ("list", [])
    assert ui.message == f"a is {'asleep' if asleep else 'awake'} already"


def test_quit_refresh_and_help_keys():
    assert press_all("q")[1] == ["quit"]
    assert press_all(" ")[1] == ["look"]
    for key in "?h":
        ui, _ = press_all(key)
        assert ui.mode == "help"
        closed, effects = press_all("q", ui=ui)
        assert (closed.mode, effects) == ("list", [])  # closes help, and not the program
        assert press_all(["escape"], ui=ui)[0].mode == "list"


def test_keys_without_instances_are_harmless():
    ui, effects = press_all([*"jkgGlmpszw/x", "enter", "escape"], ())
    assert (ui.mode, effects) == ("list", [])


KEYS = st.sampled_from(
    [*"jkgGsSrlmpzwynhq?/ 0123456789MG%xé日", "up", "down", "page_up", "page_down", "home", "end",
     "enter", "escape", "backspace", "\x15", "\x00", "\t"]
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(KEYS, max_size=40), st.integers(1, 90), st.integers(1, 30))
def test_random_keys_leave_a_drawable_screen(keys, width, height):
    ui = Ui()
    for key in keys:
        ui, effects = press(ui, key, MANY.instances)
        assert all(effect in {"quit", "look"} or isinstance(effect, Ask) for effect in effects)
    lines = screen(MANY, ui, width=width, height=height, glyphs=UNICODE, clock="")
    assert len(lines) == height


# ------------------------------------------------------------------------------ answers


def answer(**changes: object) -> Ack:
    values: dict[str, object] = {
        "revision": 3,
        "state": "applied",
        "effective_limit_bytes": GIB,
        "mapped_bytes": 64 * MIB,
        "over_bytes": 0,
        "reason": "",
        "acknowledged_ns": 1,
        "min_bytes": 0,
        "priority": 0,
        "requested_revision": 3,
        "limit_bytes": GIB,
    }
    return Ack(**(values | changes))  # type: ignore[arg-type]


LIMIT = Ask("a", "a", "limit", GIB)
SLEEP, WAKE = Ask("a", "a", "sleep", 1), Ask("a", "a", "sleep", 0)
ASLEEP = {"asleep": True, "effective_limit_bytes": 0, "mapped_bytes": 0}


@pytest.mark.parametrize(
    ("ask", "changes", "text", "mood"),
    [
        (LIMIT, {}, "a: limit 1.00 GiB applied; 64.00 MiB are mapped", "good"),
        (LIMIT, {"state": "none"}, "no reply yet", "warn"),
        (LIMIT, {"state": "shrinking", "over_bytes": MIB}, "1.00 MiB are still to be", "warn"),
        (LIMIT, {"state": "refused", "reason": "no\x1b[2J"}, "refused: no\ufffd[2J", "bad"),
        (LIMIT, {"state": "failed", "reason": "no device"}, "has failed: no device", "bad"),
        (LIMIT, {"revision": 4}, "replaced by a later request; the limit is 1.00 GiB", "bad"),
        (Ask("a", "a", "min", GIB), {}, "not taken by the instance; the guarantee is 0 B", "bad"),
        (
            Ask("a", "a", "min", GIB),
            {"min_bytes": GIB},
            "guarantee 1.00 GiB applied",
            "good",
        ),
        (Ask("a", "a", "priority", 5), {}, "not taken by the instance; the priority is 0", "bad"),
        (Ask("a", "a", "priority", 5), {"priority": 5}, "priority 5 applied", "good"),
        (SLEEP, ASLEEP, "a: sleep applied; 0 B are mapped", "good"),
        (
            SLEEP,
            ASLEEP | {"state": "shrinking", "over_bytes": MIB},
            "a: sleep accepted; 1.00 MiB are still to be given back",
            "warn",
        ),
        (SLEEP, {}, "a: sleep not taken by the instance; it is awake", "bad"),
        (SLEEP, {"revision": 4}, "a: sleep was replaced by a later request; it is awake", "bad"),
        (SLEEP, ASLEEP | {"revision": 4}, "a: sleep applied", "good"),
        (SLEEP, {"state": "none"}, "a: sleep requested; no reply yet", "warn"),
        (WAKE, {}, "a: wake applied; 64.00 MiB are mapped", "good"),
        (WAKE, ASLEEP, "a: wake not taken by the instance; it is asleep", "bad"),
        (LIMIT, ASLEEP, "applied; it is asleep until `kvctl wake a`", "good"),
        (LIMIT, ASLEEP | {"revision": 4}, "by a later request; the limit is 1.00 GiB", "bad"),
    ],
)
def test_request_results_are_shown_as_text(ask, changes, text, mood):
    message, said_mood = answer_line(ask, answer(**changes))
    assert text in message
    assert said_mood == mood
