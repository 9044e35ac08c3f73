"""A request that was refused is over: it neither spoils nor slips into those that come after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from ledger_instance import PAGE_BYTES, Instance
from segment_owner import until_replied
from waiting import DEADLINE_S

from kvelastic.errors import InvalidArgumentError
from kvelastic.shared import segment

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Instance, Instance]]:
    settings = {"KVELASTIC_HOST_MEMORY": "64M"}
    with Instance(**settings, KVELASTIC_MIN="40M") as a, Instance(**settings) as b:
        yield a, b


def test_refused_guarantee_is_discarded_completely(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    limit = segment.inspect(b.name).ack["effective_limit_bytes"]
    refused = segment.request(b.name, min_bytes=40 * MIB, limit_bytes=48 * MIB, wait_s=DEADLINE_S)
    assert refused.state == "refused"
    assert refused.effective_limit_bytes == limit, "half of a refused request was done"
    assert (refused.min_bytes, refused.priority) == (0, 0)

    assert segment.request(b.name, priority=7, wait_s=DEADLINE_S).state == "applied"
    answer = segment.request(b.name, min_bytes=8 * MIB, wait_s=DEADLINE_S)
    assert (answer.state, answer.min_bytes, answer.priority) == ("applied", 8 * MIB, 7)
    assert answer.effective_limit_bytes == limit, "the refused limit came with a later request"


def test_refused_request_may_be_repeated(pair: tuple[Instance, Instance]) -> None:
    a, b = pair
    assert segment.request(b.name, min_bytes=40 * MIB, wait_s=DEADLINE_S).state == "refused"
    assert segment.request(a.name, min_bytes=0, wait_s=DEADLINE_S).state == "applied"
    assert segment.request(b.name, min_bytes=40 * MIB, wait_s=DEADLINE_S).min_bytes == 40 * MIB


# --- requests that the instance reads together, since it did not run when they came ---------------

TOO_MUCH = 40 * MIB
"""With what the first one is guaranteed, more than the device has."""


@contextmanager
def held(instance: Instance) -> Iterator[None]:
    """It is stopped, and reads all that is requested meanwhile as one request."""
    instance.stop()
    try:
        yield
    finally:
        instance.go_on()


def wait_for_acknowledgement(instance: Instance, revision: int) -> segment.Ack:
    with segment.open_readonly(instance.name) as opened:
        assert opened.control_block.wait_ack(revision, DEADLINE_S, settled=True)
        raw = opened.control_block.read_ack()
    assert raw.pop("whole")
    return segment.Ack(**raw, requested_revision=revision)


def write(instance: Instance, **changes: Any) -> int:
    """Request without a look at the answer; the revision."""
    with segment.open_writable(instance.name) as opened, opened.writing() as control_block:
        return control_block.write_request(changes.pop("limit_bytes", None), **changes)


def test_refused_guarantee_does_not_cancel_a_later_sleep(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    with held(b):
        write(b, min_bytes=TOO_MUCH, limit_bytes=48 * MIB, priority=3)
        last = write(b, asleep=True)
    answer = wait_for_acknowledgement(b, last)
    assert (answer.state, answer.revision) == ("applied", last)
    assert segment.inspect(b.name).usage["asleep"] == 1
    assert b.alloc(1) is None
    assert (answer.min_bytes, answer.priority) == (0, 0), "half of a refused request was done"
    woken = segment.request(b.name, asleep=False, wait_s=DEADLINE_S)
    assert woken.effective_limit_bytes == 64 * MIB, "the refused limit came with a later request"


def test_guarantee_is_checked_against_the_pending_limit(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    with held(b):
        write(b, limit_bytes=8 * MIB)
        with pytest.raises(InvalidArgumentError, match="above the limit of 8"):
            segment.request(b.name, min_bytes=12 * MIB, wait_s=0)
        assert segment.request(b.name, min_bytes=4 * MIB, wait_s=0).state == "none"
        write(b, limit_bytes=16 * MIB)
        with segment.post(b.name, segment.Request(min_bytes=12 * MIB)) as higher:
            last = higher.now().requested_revision
    answer = wait_for_acknowledgement(b, last)
    assert (answer.state, answer.effective_limit_bytes) == ("applied", 16 * MIB)
    assert answer.min_bytes == 12 * MIB


def test_refused_guarantee_does_not_cancel_an_earlier_limit(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    with held(b):
        write(b, limit_bytes=8 * MIB, priority=5)
        last = write(b, min_bytes=TOO_MUCH, trim=True)
    answer = wait_for_acknowledgement(b, last)
    assert (answer.state, answer.effective_limit_bytes) == ("refused", 8 * MIB)
    assert (answer.min_bytes, answer.priority) == (0, 5)
    assert b.alloc(64) is None
    assert b.mapped_bytes <= 8 * MIB


def test_refusal_is_kept_while_an_earlier_limit_completes(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    ids = b.alloc(24)
    assert ids is not None
    assert until_replied(b.name, limit_bytes=2 * PAGE_BYTES)["state"] == "shrinking"
    last = write(b, min_bytes=TOO_MUCH)
    assert wait_for_acknowledgement(b, last).state == "refused"
    b.free(ids)  # what is over the limit goes, and is answered
    with segment.open_readonly(b.name) as opened:
        while (raw := opened.control_block.read_ack())["over_bytes"]:
            assert raw["state"] == "refused", "a refused request is called shrinking"
        assert (raw["state"], raw["revision"]) == ("refused", last)
    assert "guarantee" in raw["reason"]


def test_rest_of_a_superseded_request_is_applied(pair: tuple[Instance, Instance]) -> None:
    _, b = pair
    with held(b):
        write(b, min_bytes=8 * MIB, limit_bytes=32 * MIB)
        last = write(b, min_bytes=TOO_MUCH)
    answer = wait_for_acknowledgement(b, last)
    assert (answer.state, answer.min_bytes) == ("refused", 0)
    assert answer.effective_limit_bytes == 32 * MIB


def test_long_refusal_reason_is_not_truncated() -> None:
    """The first 128 bytes end in the middle of the device's size."""
    group = f"refused-{os.getpid()}"
    names = [f"{letter}{os.getpid()}".ljust(64, letter) for letter in "abcd"]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(
                Instance(
                    KVELASTIC_IPC_NAME=name,
                    KVELASTIC_HOST_MEMORY="680M",
                    KVELASTIC_LEDGER=group,
                    KVELASTIC_MIN="100M",
                )
            )
        answer = segment.request(names[0], min_bytes=600 * MIB, wait_s=DEADLINE_S)
        assert answer.state == "refused"
        assert answer.reason == (
            "no room for 600.00 MiB guaranteed: 380.00 MiB of the device's 680.00 MiB are left;"
            f" {names[1]} has 100.00 MiB guaranteed, {names[2]} has 100.00 MiB guaranteed, and 1"
            " more; ask for less, or lower one of these (kvctl set --min)"
        )
        granted = segment.request(names[0], min_bytes=200 * MIB, wait_s=DEADLINE_S)
        assert (granted.state, granted.reason) == ("applied", "")
