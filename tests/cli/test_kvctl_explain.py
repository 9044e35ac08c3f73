"""kvctl explain: the judgement by table, and what it says of real instances that wait."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from called_kvctl import kvctl
from ledger_instance import BLOCKS_PER_PAGE, Instance
from segment_owner import Owner
from terminal import Terminal
from waiting import wait_until

from kvelastic.cli.commands.explain import choose_ledger, explanation_json, explanation_text
from kvelastic.doctor.judge_instance import explain
from kvelastic.instance.status import InstanceStatus
from kvelastic.shared import segment
from kvelastic.shared.ledger_facts import LedgerInfo, Member
from kvelastic.shared.link_status import HeldStatus, NodeStatus

KVCTL = str(Path(sys.executable).with_name("kvctl"))

MIB = 1 << 20
CALM = InstanceStatus(
    name="a",
    life="alive",
    state="applied",
    uuid=b"a" * 16,
    engine="vLLM",
    model="m",
    device="host",
    pid=11,
    capacity_bytes=1000 * MIB,
    mapped_bytes=100 * MIB,
    in_use_bytes=60 * MIB,
    cached_bytes=20 * MIB,
    parked_bytes=10 * MIB,
    page_bytes=2 * MIB,
    limit_bytes=500 * MIB,
    effective_limit_bytes=500 * MIB,
)


def member(name: str, **changes) -> Member:
    plain = Member(
        name=name,
        uuid=name.encode() * 16,
        pid=ord(name[0]),
        status="alive",
        granted_bytes=100 * MIB,
        min_bytes=0,
        limit_bytes=500 * MIB,
        priority=0,
        in_use_bytes=60 * MIB,
        evictable_bytes=20 * MIB,
        parked_bytes=10 * MIB,
        page_bytes=2 * MIB,
        idle_s=0.0,
        ask_bytes=0,
        ask_s=0.0,
        wanted_bytes=0,
    )
    return replace(plain, **changes)


def ledger(*members: Member, **changes) -> LedgerInfo:
    plain = LedgerInfo("host", "readable", capacity_bytes=1000 * MIB, members=members)
    return replace(plain, **changes)


def said(facts: InstanceStatus, of: LedgerInfo | None = None) -> str:
    return "\n".join(
        f"{line.about}{'!' if line.is_blocked else ':'} {line.what} -> {line.do}"
        for line in explain(facts, of)
    )


ASKING = {"ask_bytes": 50 * MIB, "ask_s": 2.0}
SLACK: dict[str, Any] = {"in_use_bytes": 5 * MIB, "blocks_in_use": 5, "blocks_cached": 100}
REACHED = replace(
    CALM,
    limit_bytes=100 * MIB,
    effective_limit_bytes=100 * MIB,
    in_use_bytes=100 * MIB,
    cached_bytes=0,
    parked_bytes=0,
)
FULL = {"others_bytes": 1000 * MIB}

CASES = {
    "where memory is": (CALM, None, [
        "holds: It holds 100.00 MiB of the device's 1000.00 MiB.",
        "in use: 60.00 MiB (60%)",
        "cached: 20.00 MiB (20%)",
        "parked: 10.00 MiB (10%)",
        "run kvctl trim a to release them",
        "slack: 10.00 MiB (10%)",
        "limit: Its limit is 500.00 MiB: 400.00 MiB more can be mapped.",
        "joined no ledger",
    ], ["guarantee", "priority", "!", "KVELASTIC_PAGE_SIZE_MB"]),
    "nothing held": (
        replace(CALM, mapped_bytes=0, in_use_bytes=0, cached_bytes=0, parked_bytes=0), None,
        ["It holds no memory of the device's 1000.00 MiB."], ["cached", "parked", "slack"]),
    "much slack": (
        replace(CALM, **SLACK, page_bytes=8 * MIB, mappings_per_page=1), None,
        ["slack: 65.00 MiB (65%)", "KVELASTIC_PAGE_SIZE_MB"], []),
    "much slack, and pages as small as they get on two ranks": (
        replace(CALM, **SLACK, page_bytes=4 * MIB, mappings_per_page=2), None,
        ["slack: 65.00 MiB (65%)"], ["KVELASTIC_PAGE_SIZE_MB"]),
    "much slack, and pages as small as they get a buffer": (
        replace(CALM, **SLACK, page_bytes=48 * MIB, mappings_per_page=24), None,
        ["slack: 65.00 MiB (65%)"], ["KVELASTIC_PAGE_SIZE_MB"]),
    "much slack, and no more than eight blocks a page": (
        replace(CALM, **(SLACK | {"blocks_cached": 20}), page_bytes=8 * MIB, mappings_per_page=1),
        None, ["slack: 65.00 MiB (65%)"], ["KVELASTIC_PAGE_SIZE_MB"]),
    "set aside": (
        replace(CALM, in_use_bytes=40 * MIB, set_aside_bytes=20 * MIB), None,
        ["in use: 40.00 MiB (40%)", "set aside: 20.00 MiB (20%)", "slack: 10.00 MiB"], []),
    "a limit that is the whole device": (
        replace(CALM, limit_bytes=1000 * MIB, effective_limit_bytes=1000 * MIB), None,
        ["Its limit is 1000.00 MiB (the whole device): 900.00 MiB more can be mapped."], []),
    "no limit": (
        replace(CALM, is_limited=False, limit_bytes=1000 * MIB, effective_limit_bytes=1000 * MIB),
        None,
        ["limit: It has no limit: 900.00 MiB more can be mapped within the 1000.00 MiB of the"],
        ["Its limit"]),
    "no limit, and fewer addresses than the device has": (
        replace(CALM, is_limited=False, limit_bytes=1000 * MIB), None,
        ["400.00 MiB more can be mapped within the 500.00 MiB of its reserved address"], []),
    "a device below one page": (
        replace(CALM, mapped_bytes=0, capacity_bytes=MIB, page_bytes=4 * MIB), None,
        ["limit! The capacity of its device, 1.00 MiB, is less than one page of 4.00 MiB: it",
         "-> run kvctl capacity host SIZE with 4M or more"], ["can be mapped"]),
    "dead": (replace(CALM, life="dead"), None, ["process 11 has ended", "kvctl gc"], ["holds"]),
    "closing": (replace(CALM, life="closing"), None, ["It is stopping", "holds:"], []),
    "unknown": (replace(CALM, life="unknown"), None, ["Its liveness is unknown", "holds:"], []),
    "a limit that is not whole pages": (
        replace(REACHED, limit_bytes=101 * MIB, blocks_available=3), None,
        ["Its limit of 101.00 MiB (100.00 MiB in whole pages) is reached; 3 blocks can"], []),
    "a limit below one page": (
        replace(REACHED, limit_bytes=MIB, page_bytes=100 * MIB), None,
        ["Its limit of 1.00 MiB (100.00 MiB: one page is the least) is reached"], []),
    "a limit that is not whole pages, and a guarantee of as much": (
        replace(REACHED, limit_bytes=101 * MIB, min_bytes=101 * MIB), None,
        ["Its guarantee is 101.00 MiB (100.00 MiB in whole pages): other instances may"],
        ["but its limit", "kvctl set"]),
    "a guarantee that is not whole pages": (
        replace(CALM, min_bytes=120 * MIB, page_bytes=34 * MIB, mapped_bytes=68 * MIB), None,
        ["Its guarantee is 120.00 MiB (102.00 MiB in whole pages): it can claim 34.00 MiB more"],
        []),
    "a guarantee below one page": (
        replace(CALM, min_bytes=MIB, page_bytes=34 * MIB, mapped_bytes=68 * MIB), None,
        ["Its guarantee is 1.00 MiB (34.00 MiB: one page is the least): other instances may"
         " take at most 34.00 MiB of its memory."], []),
    # --- requests that wait for memory
    "no request waits": (replace(CALM, requests_waiting=0), None, [], ["waiting"]),
    "requests wait for others": (
        replace(CALM, requests_waiting=2), None,
        ["waiting! 2 requests wait for memory until running requests end."], ["kvctl limit"]),
    "a request waits that the limit allows": (
        replace(CALM, requests_waiting=1, first_needs_bytes=40 * MIB), None,
        ["waiting! 1 request waits for memory. The first needs 40.00 MiB (20 pages of 2.00 MiB)",
         "which its limit allows"], ["kvctl limit"]),
    "a request needs more than the limit": (
        replace(CALM, requests_waiting=3, first_needs_bytes=600 * MIB), None,
        ["waiting! 3 requests wait for memory.", "needs 600.00 MiB (300 pages of 2.00 MiB)",
         "its limit allows 500.00 MiB (250 pages of 2.00 MiB): it waits until the limit is raised.",
         "-> kvctl limit a 600M"], ["maximum output"]),
    "and more at its end": (
        replace(CALM, requests_waiting=3, first_needs_bytes=600 * MIB,
                first_may_need_bytes=700 * MIB), None,
        ["With its maximum output it needs 700.00 MiB.", "-> kvctl limit a 700M"], []),
    "and at its end more than the device has": (
        replace(CALM, requests_waiting=3, first_needs_bytes=600 * MIB,
                first_may_need_bytes=7000 * MIB), None, ["-> kvctl limit a 1000M"], []),
    "a request needs more than the device": (
        replace(CALM, requests_waiting=1, first_needs_bytes=1200 * MIB), None,
        ["the capacity of the device is 1000.00 MiB: raising the limit does not help",
         "kvctl capacity host SIZE with 1200M"], ["kvctl limit"]),
    "a request waits for memory pressure to end": (
        replace(CALM, requests_waiting=1, first_needs_bytes=400 * MIB, is_squeezed=True,
                effective_limit_bytes=100 * MIB), None, ["which its limit allows"],
        ["kvctl limit"]),
    "requests wait for one that sleeps": (
        replace(CALM, requests_waiting=2, first_needs_bytes=600 * MIB, asleep=True,
                effective_limit_bytes=0), None,
        ["waiting! 2 requests wait until the instance wakes. -> kvctl wake a"], ["kvctl limit"]),
    # --- requests and limits
    "a request just made": (
        replace(CALM, request_state="pending", requested_limit_bytes=MIB, pending_s=0.1), None,
        ["request! The newest request (limit 1.00 MiB) was made 0.1 s ago"], ["hangs"]),
    "a request without a reply": (
        replace(CALM, request_state="pending", pending_s=9), None,
        ["request! The newest request was made 9.0 s ago", "its process 11 is stopped or hangs"],
        []),
    "refused": (
        replace(CALM, request_state="refused", reason="too much"), None,
        ["request! The newest request was refused: too much."], []),
    "reached, and a larger one helps": (
        REACHED, None, ["limit! Its limit of 100.00 MiB is reached", "kvctl limit a SIZE"], []),
    "reached, and blocks are available": (
        replace(REACHED, blocks_available=1), None, ["1 block can still be allocated"],
        ["!", "kvctl limit a SIZE"]),
    "reached, and cached": (
        replace(REACHED, cached_bytes=20 * MIB), None, ["to cache more"], ["!"]),
    "reached, which is all the addresses it has": (
        replace(REACHED, limit_bytes=1000 * MIB, is_limited=False, cached_bytes=20 * MIB), None,
        ["Its limit of 100.00 MiB is reached"], ["kvctl limit a SIZE"]),
    "reached, which is the device": (
        replace(REACHED, capacity_bytes=100 * MIB, cached_bytes=20 * MIB), None,
        ["Its limit of 100.00 MiB is reached"], ["kvctl limit a SIZE"]),
    "reached, and the device is full of those who rank above": (
        REACHED, ledger(member("a"), member("b", priority=1, granted_bytes=900 * MIB), **FULL),
        ["Its limit of 100.00 MiB is reached"], ["kvctl limit a SIZE"]),
    "reached, and the device is full of those who rank below": (
        REACHED, ledger(member("a"), member("b", priority=-1, granted_bytes=900 * MIB), **FULL),
        ["Its limit of 100.00 MiB is reached", "kvctl limit a SIZE"], []),
    "under pressure": (
        replace(REACHED, limit_bytes=500 * MIB, is_squeezed=True, over_bytes=50 * MIB), None,
        ["Its limit is 500.00 MiB; memory pressure lowers it to 100.00 MiB",
         "limit! It is 50.00 MiB over the lowered limit, and none"],
        ["kvctl limit", "over its limit"]),
    # --- sleep
    "asleep, and its engine awake": (
        replace(CALM, asleep=True, engine_asleep=False, mapped_bytes=0), None,
        ["asleep! It is asleep", "Its engine is awake", "-> kvctl wake a\n"], ["engine!"]),
    "asleep, and its engine too": (
        replace(CALM, asleep=True, engine_asleep=True, mapped_bytes=0), None,
        ["kvctl wake a alone is not enough", "engine! Its engine is asleep too", "POST /wake_up"],
        []),
    "awake, and its engine asleep": (
        replace(CALM, engine_asleep=True), None,
        ["engine! Its engine is asleep, but the instance is awake", "/action/wakeup"], ["asleep!"]),
    "over, and in use": (
        replace(
            CALM, request_state="shrinking", limit_bytes=40 * MIB, effective_limit_bytes=40 * MIB,
            over_bytes=60 * MIB
        ), None,
        ["limit! It is 60.00 MiB over its limit of 40.00 MiB, and only 30.00 MiB of it is parked",
         "allocates no blocks", "kvctl limit a SIZE"], []),
    "over, and nothing spare": (
        replace(CALM, over_bytes=60 * MIB, cached_bytes=0, parked_bytes=0), None,
        ["limit!", "none of it is parked or cached"], []),
    "over, and on its way": (
        replace(CALM, effective_limit_bytes=80 * MIB, over_bytes=20 * MIB), None,
        ["limit! It is 20.00 MiB over", "releases parked pages and cached blocks"],
        ["allocates no blocks"]),
    "at its limit with a cache": (
        replace(CALM, effective_limit_bytes=101 * MIB), None,
        ["limit: Its limit of 101.00 MiB is reached: new blocks replace 30.00 MiB of parked"],
        []),
    "at its limit, all in use": (
        replace(CALM, effective_limit_bytes=100 * MIB, cached_bytes=0, parked_bytes=0), None,
        ["limit! Its limit of 100.00 MiB is reached, and no memory is parked", "wait until"], []),
    "asleep, with a reserve and a guarantee": (
        replace(CALM, asleep=True, min_bytes=50 * MIB, mapped_bytes=0),
        ledger(member("a", asleep=True, min_bytes=50 * MIB, reserve_bytes=30 * MIB)),
        ["guarantee: Its guarantee is 50.00 MiB, which does not apply while it sleeps.",
         "reserve: Before it wakes it requests 30.00 MiB for weights and activations and its"
         " guarantee of 50.00 MiB"], ["other instances may take", "outside its KV cache"]),
    "asleep, and about to wake": (
        replace(CALM, asleep=True, mapped_bytes=0),
        ledger(member("a", asleep=True, reserve_bytes=30 * MIB, pledged_bytes=30 * MIB)),
        ["reserve! It waits for 30.00 MiB for weights and activations before it wakes:"],
        ["Before it wakes"]),
    # --- reserve, guarantee and priority
    "a reserve on a GPU": (
        CALM, ledger(member("a", reserve_bytes=30 * MIB, pledged_bytes=30 * MIB)),
        ["reserve: 30.00 MiB are reserved for its weights and activations, outside its KV",
         "device: 30.00 MiB are reserved for weights and activations of awake instances;"
         " KV caches cannot use it."], ["reserve!"]),
    "a reserve on the host, beside the capacity": (
        CALM,
        ledger(
            member("a", reserve_bytes=30 * MIB, pledged_bytes=30 * MIB), total_bytes=2000 * MIB
        ),
        ["; this is not part of the 1000.00 MiB for KV caches."], ["caches cannot use"]),
    "a reserve on the host, in part beside the capacity": (
        CALM,
        ledger(
            member("a", reserve_bytes=30 * MIB, pledged_bytes=30 * MIB), total_bytes=1010 * MIB
        ),
        ["30.00 MiB are reserved for weights", "; 10.00 MiB of it is not part of"], []),
    "a larger reserve that others have not given yet": (
        CALM, ledger(member("a", reserve_bytes=30 * MIB, pledged_bytes=70 * MIB)),
        ["reserve! It waits for 70.00 MiB for weights and activations: other instances are"], []),
    "a guarantee that it is under": (
        replace(CALM, min_bytes=120 * MIB), ledger(member("a", min_bytes=120 * MIB)),
        ["Its guarantee is 120.00 MiB: it can claim 20.00 MiB more"], []),
    "a guarantee that it is over": (
        replace(CALM, min_bytes=30 * MIB), ledger(member("a", min_bytes=30 * MIB)),
        ["is 30.00 MiB: other instances may take at most 70.00 MiB of its"], []),
    "a guarantee above its limit": (
        replace(CALM, min_bytes=600 * MIB), None,
        ["but its limit is only 500.00 MiB.", "kvctl set a with a larger --limit"], []),
    "no guarantee among others": (
        CALM, ledger(member("a"), member("b")),
        ["It has no guarantee", "kvctl set a --min SIZE"], []),
    "alone on its device": (
        CALM, ledger(member("a")),
        ["900.00 MiB of the device's 1000.00 MiB are free, and no other instance uses it."],
        ["priority", "guarantee"]),
    "among priorities": (
        CALM, ledger(member("a"), member("b", priority=1), member("c", priority=-1)),
        ["Its priority is 0; higher: b; lower: c.", "2 other instances hold 200.00 MiB."], []),
    "among equals": (
        CALM, ledger(member("a"), member("b")),
        ["equal to all other instances here", "1 other instance holds 100.00 MiB."], []),
    "many above": (
        CALM, ledger(member("a"), *(member(n, priority=1) for n in "bcdef")),
        ["higher: b, c, d and 2 others."], []),
    "other programs on the device": (
        CALM, ledger(member("a"), others_bytes=300 * MIB),
        ["600.00 MiB of the device's", "Other processes use 300.00 MiB of the device."],
        []),
    "a dead one that still counts": (
        CALM, ledger(member("a"), member("b", status="dead")),
        ["b has ended but still has 100.00 MiB granted", "kvctl gc", "no other instance uses it"],
        []),
    # --- asking
    "asks, and there is room": (
        CALM, ledger(member("a", **ASKING)),
        ["asks: It requests 50.00 MiB more and has waited 2.0 s; 900.00 MiB are free, so the"],
        []),
    "asks, and so does another": (
        CALM, ledger(member("a", **ASKING), member("b", **ASKING)),
        ["asks! It requests", "are free, also requested by b.",
         "asked: b (priority 0, holds 100.00 MiB) requests"],
        []),
    "asks one who can give": (
        CALM, ledger(member("a", **ASKING), member("b", wanted_bytes=25 * MIB), **FULL),
        ["asks! It requests 50.00 MiB more and has waited 2.0 s for b to release memory.",
         "asks! b was requested to release 25.00 MiB and releases parked pages"], []),
    "asks one whose blocks are in use": (
        CALM, ledger(member("a", **ASKING), member("b", wanted_bytes=50 * MIB), **FULL),
        ["asks! b was requested to release 50.00 MiB, of which 30.00 MiB is parked or cached"],
        []),
    "asks one who cannot be seen": (
        CALM,
        ledger(member("a", **ASKING), member("b", wanted_bytes=MIB, status="unknown"), **FULL),
        ["b was requested to release 1.00 MiB, and its liveness is unknown"], []),
    "asks, and no instance has to release": (
        CALM, ledger(member("a", **ASKING), member("b", priority=4), **FULL),
        ["asks! It requests", "no instance has to release any yet, but b could",
         "run kvctl set a --priority 5, or lower the limit of b"], []),
    "asks, and all is guaranteed": (
        CALM, ledger(member("a", **ASKING), member("b", min_bytes=100 * MIB), **FULL),
        ["asks! It requests", "no instance holds more than its guarantee"], []),
    # --- being asked
    "is asked and gives": (
        CALM, ledger(member("a", wanted_bytes=25 * MIB), member("b", **ASKING), **FULL),
        ["asked: b (priority 0, holds 100.00 MiB) requests 50.00 MiB and has waited 2.0 s.",
         "asked: It was requested to release 25.00 MiB, and releases parked pages"], []),
    "is asked for what is in use": (
        CALM, ledger(member("a", wanted_bytes=50 * MIB), member("b", **ASKING), **FULL),
        ["asked! It was requested to release 50.00 MiB, of which 30.00 MiB is parked", "--min"],
        []),
    "is asked for what is guaranteed": (
        replace(CALM, min_bytes=100 * MIB),
        ledger(member("a", wanted_bytes=50 * MIB, min_bytes=100 * MIB), member("b", **ASKING)),
        ["asked: It was requested to release 50.00 MiB, but holds no more than its"], []),
    # --- ledgers that say nothing
    "another user's ledger": (
        CALM, LedgerInfo("host", "foreign", problem="it is of user 7"),
        ["cannot be read (it is of user 7)", "run the same version of kvctl"], ["priority"]),
    "a damaged ledger": (
        CALM, LedgerInfo("host", "unreadable", problem="damaged"),
        ["cannot be read (damaged)", "kvctl doctor"], ["priority"]),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "of", "some", "none"), CASES.values(), ids=CASES)
def test_explanation_has_the_expected_parts(facts, of, some, none):
    text = said(facts, of)
    assert [part for part in some if part not in text] == [], text
    assert [part for part in none if part in text] == [], text


@pytest.mark.parametrize(("facts", "of", "some", "none"), CASES.values(), ids=CASES)
def test_every_line_is_one_sentence(facts, of, some, none):
    for line in explain(facts, of):
        assert line.what.endswith(".")
        assert "\n" not in line.what + line.do
        assert line.about == line.about.lower()


def test_blocks_held_for_peers_are_explained():
    node = NodeStatus(
        1, 1, "prefill", (), 0, *(0,) * 9, (), 2, 5 * MIB, (HeldStatus("cmpl-1", MIB, 41_000),), 3
    )
    (held,) = [one for one in explain(CALM, None, [node]) if one.about == "held"]
    assert held.what == (
        "5.00 MiB of 2 finished requests are held until a decode engine has read them; the first"
        " hold, of cmpl-1, ends in 41 s at the latest. 3 holds ended because no decode engine had"
        " read the blocks in time."
    )


def test_chosen_ledger_is_the_instances_own():
    mine = ledger(member("b"), member("a"), device="GPU-1")
    other = ledger(member("c"))
    closed = LedgerInfo("host", "foreign")
    assert choose_ledger([other, closed, mine], b"a" * 16, "host") is mine
    assert choose_ledger([other, closed], b"a" * 16, "host") is closed
    assert choose_ledger([other, closed], b"a" * 16, "GPU-1") is None
    assert choose_ledger([], b"a" * 16, "host") is None


def test_unreadable_ledger_is_reported():
    group = f"explain-{random.randrange(1 << 40):x}"
    with Instance(**DEVICE | {"KVELASTIC_LEDGER": group}) as one:
        (path,) = Path("/dev/shm").glob(f".kvelastic_ledger_{group}_*")
        with path.open("r+b") as file:
            file.seek(8)
            file.write((99).to_bytes(4, "little"))  # of a version that is not known
        try:
            assert "The ledger of its device cannot be read" in kvctl("explain", one.name).stdout
        finally:
            path.unlink()


def test_control_characters_in_texts_are_replaced():
    facts = replace(CALM, request_state="refused", reason="\x1b[2Jgone", model="m\x1b[31m")
    text = explanation_text(facts, explain(facts, None))
    assert "\x1b" not in text
    assert "\ufffd[2Jgone" in text


@pytest.mark.parametrize("columns", [50, 60, 80, 200])
def test_lines_wrap_on_terminals_but_not_in_pipes(columns):
    facts = replace(CALM, effective_limit_bytes=40 * MIB, over_bytes=60 * MIB)
    lines = explain(facts, ledger(member("a"), member("b", **ASKING)))
    wrapped = explanation_text(facts, lines, columns=columns)
    assert max(map(len, wrapped.splitlines())) <= columns
    whole = explanation_text(facts, lines)
    assert wrapped.split() == whole.split()
    for line in lines:
        assert line.what in whole
        assert line.do in whole


def test_blocked_lines_are_coloured():
    lines = explain(replace(CALM, over_bytes=60 * MIB), None)
    coloured = explanation_text(CALM, lines, columns=60, in_colour=True)
    assert coloured.count("\x1b[33m") == sum(line.is_blocked for line in lines) == 1
    assert "\x1b" not in explanation_text(CALM, lines, columns=60)


@pytest.mark.slow
def test_no_color_turns_colours_off_on_a_terminal(name):
    with Owner(name):
        for environ, is_coloured in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
            with Terminal([KVCTL, "explain", name], columns=50, **environ) as terminal:
                text = terminal.until("joined no ledger")
            assert ("\x1b[" in text) == is_coloured
            if not is_coloured:
                assert max(map(len, text.splitlines())) <= 50


# ---------------------------------------------------------------------------- real instances


DEVICE = {
    "KVELASTIC_HOST_MEMORY": "32M",
    "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    "KVELASTIC_IDLE_TRIM_SECONDS": "3600",
    "KVELASTIC_RECLAIM_WAIT": "3600",
}


@pytest.mark.slow
def test_waiting_instance_and_holder_name_each_other():
    """One holds the device and is stopped; the other asks it, and both explanations say so."""
    with Instance(**DEVICE) as holder, Instance(KVELASTIC_PRIORITY="5", **DEVICE) as requester:
        holder.cache(holder.alloc(15 * BLOCKS_PER_PAGE - 1))
        holder.stop()
        requester.send("alloc", 10 * BLOCKS_PER_PAGE)
        told = waiting(requester.name)
        (asks, giver) = (line for line in told["lines"] if line["about"] == "asks")
        assert asks["is_blocked"]
        assert f"for {holder.name} to release memory." in asks["what"]
        assert f"{holder.name} was requested to release" in giver["what"]
        assert told["askers"] == []
        seen = wait_until(lambda: (told := explained(holder.name))["askers"] and told)
        assert [(one["name"], one["pid"]) for one in seen["askers"]] == [
            (requester.name, requester.pid)
        ]
        assert seen["askers"][0]["priority"] == 5
        assert seen["wanted_bytes"] > 0
        assert seen["granted_bytes"] == seen["mapped_bytes"]
        assert f"higher: {requester.name}." in kvctl("explain", holder.name).stdout
        holder.go_on()
        assert len(requester.read()) == 10 * BLOCKS_PER_PAGE
        assert explained(requester.name)["ask_bytes"] == 0


def explained(name: str) -> dict:
    return json.loads(kvctl("explain", name, "--json").stdout)


def waiting(name: str) -> dict:
    """What is said of an instance as soon as it asks another for memory."""

    def told() -> dict:
        seen = explained(name)
        return seen if sum(line["about"] == "asks" for line in seen["lines"]) > 1 else {}

    return wait_until(told)


def test_the_json_has_the_documented_keys(name):
    with Owner(name):
        told = json.loads(kvctl("explain", name, "--json").stdout)
    whole = explanation_json(CALM, ledger(member("a"), member("b", **ASKING)), explain(CALM, None))
    assert set(told) == set(whole)
    documented = (Path(__file__).parents[2] / "docs" / "kvctl.md").read_text()
    _, _, section = documented.partition("## explain --json")
    section, _, _ = section.partition("\n## ")
    keys = set(whole) | set(whole["askers"][0]) | set(whole["lines"][0])
    assert [key for key in keys if f"`{key}`" not in section] == []
    assert told["granted_bytes"] is None
    assert told["slack_bytes"] == told["mapped_bytes"] - (96 * MIB)
    json.dumps(whole)


def test_unacknowledged_request_is_shown(name):
    with Owner(name, "mute"):
        segment.request(name, limit_bytes=MIB, wait_s=0)
        assert "The newest request (limit 1.00 MiB) was made" in kvctl("explain", name).stdout


def test_unknown_and_unreadable_instances_exit_1(name):
    missing = kvctl("explain", "no_such_instance")
    assert (missing.exit_code, missing.stdout) == (1, "")
    path = Path("/dev/shm") / name
    path.write_bytes(b"KVELASTC" + (99).to_bytes(4, "little") + bytes(500))
    try:
        unreadable = kvctl("explain", name)
        assert unreadable.exit_code == 1
        assert "version 99" in unreadable.stderr
    finally:
        path.unlink()
    assert kvctl("explain").exit_code == 2


def test_dead_instance_exits_1(name):
    with Owner(name) as owner:
        owner.kill()
        died = kvctl("explain", name)
        assert died.exit_code == 1
        assert "has ended" in died.stderr
