"""kvctl set and trim: guarantees, limits and priorities of real instances, and parked pages."""

from __future__ import annotations

import json
import re

import pytest
from called_kvctl import kvctl
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from segment_owner import Owner

from kvelastic.shared import segment

MIB = 1 << 20
DEVICE = {
    "KVELASTIC_HOST_MEMORY": "64M",
    "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    "KVELASTIC_IDLE_TRIM_SECONDS": "3600",
}


def row(name: str) -> dict:
    return json.loads(kvctl("list", name, "--json").stdout)[0]


def request_of(name: str) -> dict:
    return segment.inspect(name).request


def test_set_sends_all_options_in_one_request():
    with Instance(**DEVICE) as one:
        result = kvctl(
            "set",
            one.name,
            *("--min", "16M", "--limit", "48M", "--priority", "-3", "--wait", "300"),
        )
        assert result.exit_code == 0, result.stderr
        assert result.stdout == (
            f"{one.name}: limit 48.00 MiB (50331648 bytes), guarantee 16.00 MiB (16777216 bytes),"
            " priority -3 applied; 0 B are mapped.\n"
        )
        assert request_of(one.name)["revision"] == 1
        entry = row(one.name)
        assert (entry["limit_bytes"], entry["min_bytes"]) == (48 * MIB, 16 * MIB)
        assert entry["priority"] == -3


@pytest.mark.parametrize(
    ("option", "value", "key", "want"),
    [
        ("--min", "4M", "min_bytes", 4 * MIB),
        ("--limit", "8M", "limit_bytes", 8 * MIB),
        ("--priority", "7", "priority", 7),
    ],
)
def test_set_keeps_options_that_are_not_given(option, value, key, want):
    with Instance(**DEVICE) as one:
        before = row(one.name)
        assert kvctl("set", one.name, option, value, "--wait", "300").exit_code == 0
        after = row(one.name)
        changed = {k for k in ("limit_bytes", "min_bytes", "priority") if before[k] != after[k]}
        assert changed == {key}
        assert after[key] == want


def test_no_limit_is_shown_as_none():
    with Instance(**DEVICE) as one:

        def shown() -> tuple[str, str, str]:
            heading, line = kvctl("list", one.name).stdout.splitlines()
            columns = dict(zip(heading.split(), line.replace(" MiB", "MiB").split(), strict=False))
            stats = re.search(r"\n  limit +(.*)\n", kvctl("stats", one.name).stdout)
            table = kvctl("kvtop", one.name, "--once").stdout
            assert stats is not None
            return columns["LIMIT"], stats[1], table[table.index("NAME") :]

        listed, of_stats, table = shown()
        assert (listed, of_stats) == ("none", "none")
        assert " none " in table
        assert row(one.name)["limit_bytes"] == 64 * MIB
        kvctl("limit", one.name, "32M", "--wait", "300")
        listed, of_stats, table = shown()
        assert (listed, of_stats) == ("32.00MiB", "32.00 MiB")
        assert " none " not in table


def test_guarantee_is_shown_in_whole_pages():
    with Instance(**DEVICE) as one:
        for asked, shown in (("5M", "4.00 MiB (2 pages of 2.00 MiB)"), ("1M", "2.00 MiB (1 page")):
            result = kvctl("set", one.name, "--min", asked, "--wait", "300")
            assert result.exit_code == 0, result.stderr
            assert f"; in whole pages the guarantee is {shown}" in result.stdout
        assert row(one.name)["min_bytes"] == MIB


@pytest.mark.slow
def test_guarantee_above_device_capacity_is_refused(answered):
    with Instance(**DEVICE) as one, Instance(**DEVICE) as other:
        assert kvctl("set", one.name, "--min", "40M", "--wait", "300").exit_code == 0
        refused = kvctl("set", other.name, "--min", "40M", "--priority", "9", "--wait", "300")
        assert refused.exit_code == 1
        assert "guarantee 40.00 MiB (41943040 bytes), priority 9 refused: " in refused.stderr
        assert row(other.name)["state"] == "refused"
        assert (row(other.name)["min_bytes"], row(other.name)["priority"]) == (0, 0)
        unwaited = kvctl("set", other.name, "--min", "40M")
        assert unwaited.exit_code == 1
        assert "refused" in unwaited.stderr


def test_ignored_guarantee_is_reported_as_not_applied(name):
    """An instance that knows no guarantees answers `applied`, with a guarantee of 0."""
    with Owner(name):
        result = kvctl("set", name, "--min", "1G", "--priority", "2", "--wait", "300")
        assert result.exit_code == 1
        assert "not taken by the instance; the guarantee is 0 B" in result.stderr
        assert "the priority is 0" in result.stderr
        assert kvctl("set", name, "--limit", "1G", "--wait", "300").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("refuse", 1, " refused: it is only a test"),
        (
            "shrink",
            3,
            "1 page, which is the least); 95.00 MiB are still to be given back after 0.05 s",
        ),
        ("mute", 3, "requested; no reply yet after 0.05 s"),
    ],
)
def test_set_reports_refused_shrinking_and_missing_replies(name, mode, code, text, request):
    if mode != "mute":
        request.getfixturevalue("answered")
    with Owner(name, mode):
        waited = kvctl("set", name, "--limit", "1M", "--wait", "0.05")
        assert waited.exit_code == code
        assert text in waited.stderr
        unwaited = kvctl("set", name, "--limit", "1M")
        assert unwaited.exit_code == (1 if mode == "refuse" else 0)


def test_superseded_set_request_is_reported_as_replaced(name, monkeypatch):
    with Owner(name):
        late = segment.Ack(
            revision=5,
            state="applied",
            effective_limit_bytes=MIB,
            mapped_bytes=0,
            over_bytes=0,
            reason="",
            acknowledged_ns=1,
            min_bytes=3 * MIB,
            priority=4,
            requested_revision=4,
            limit_bytes=MIB,
        )
        monkeypatch.setattr(segment, "request", lambda *_, **__: late)
        result = kvctl("set", name, "--min", "1M", "--limit", "2M", "--wait", "1")
        assert result.exit_code == 1
        assert "was replaced by a later request; the limit is 1.00 MiB" in result.stderr
        assert "the guarantee is 3.00 MiB" in result.stderr
        assert "priority" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--wait", "1"),
        ("--min", "banana"),
        ("--min", "-1"),
        ("--min", ""),
        ("--limit", "nan"),
        ("--limit", "9E"),
        ("--priority", "high"),
        ("--priority", "1.5"),
        ("--priority", "1001"),
        ("--priority", "-1001"),
        ("--min", "1M", "--wait", "-1"),
        ("--min",),
        ("1M",),
        ("-5",),
    ],
)
def test_wrong_usage_of_set_changes_nothing(name, arguments):
    with Owner(name):
        result = kvctl("set", name, *arguments)
        assert result.exit_code == 2
        assert result.stderr
        assert "Traceback" not in result.output
        assert request_of(name)["revision"] == 0


def test_set_without_options_lists_the_options(name):
    with Owner(name):
        assert "--min, --limit or --priority" in kvctl("set", name).stderr


@pytest.mark.parametrize("arguments", [("set", "--min", "1M"), ("trim",)])
def test_unknown_and_dead_instances_exit_1(name, arguments):
    verb, *options = arguments
    missing = kvctl(verb, "no_such_instance", *options)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "no segment is called 'no_such_instance'" in missing.stderr
    with Owner(name) as owner:
        owner.kill()
        died = kvctl(verb, name, *options, "--wait", "5")
        assert died.exit_code == 1
        assert "has ended" in died.stderr


# ------------------------------------------------------------------------------------------ trim


def test_trim_unmaps_parked_pages_and_reports_bytes():
    with Instance(**DEVICE) as one:
        kept = one.alloc(BLOCKS_PER_PAGE - 1)  # with the null block: one page
        one.free(one.alloc(5 * BLOCKS_PER_PAGE))
        parked_bytes = row(one.name)["parked_bytes"]
        assert parked_bytes == 5 * PAGE_BYTES
        result = kvctl("trim", one.name, "--wait", "300")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == (
            f"{one.name}: 10.00 MiB ({parked_bytes} bytes) were given back; 2.00 MiB are mapped.\n"
        )
        assert one.mapped_bytes == row(one.name)["mapped_bytes"] == PAGE_BYTES
        assert kept
        again = kvctl("trim", one.name, "--wait", "300")
        assert again.exit_code == 0
        assert "0 B (0 bytes) were given back" in again.stdout


@pytest.mark.slow
def test_trim_keeps_cached_blocks_and_limits():
    with Instance(**DEVICE) as one:
        ids = one.alloc(3 * BLOCKS_PER_PAGE - 1)
        one.cache(ids)
        assert kvctl("set", one.name, "--limit", "32M", "--wait", "300").exit_code == 0
        cached_bytes = row(one.name)["cached_bytes"]
        assert cached_bytes > 0
        assert kvctl("trim", one.name, "--wait", "300").exit_code == 0
        assert row(one.name)["cached_bytes"] == cached_bytes
        assert row(one.name)["limit_bytes"] == 32 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("refuse", 1, "trim refused: it is only a test"),
        ("mute", 3, "trim requested; no reply yet after 0.05 s"),
    ],
)
def test_trim_refused_or_unacknowledged_fails(name, mode, code, text, request):
    if mode != "mute":
        request.getfixturevalue("answered")
    with Owner(name, mode):
        waited = kvctl("trim", name, "--wait", "0.05")
        assert waited.exit_code == code
        assert text in waited.stderr
        assert kvctl("trim", name).exit_code == (1 if mode == "refuse" else 0)


@pytest.mark.slow
def test_trim_of_instance_over_its_limit_exits_3(name, answered):
    with Owner(name, "shrink"):
        kvctl("limit", name, "1M")
        waited = kvctl("trim", name, "--wait", "0.05")
        assert waited.exit_code == 3
        assert "95.00 MiB of that over the limit and still to be given back" in waited.stderr


def test_wrong_usage_of_trim(name):
    with Owner(name):
        for arguments in (("trim",), ("trim", name, "1M"), ("trim", name, "--wait", "x")):
            assert kvctl(*arguments).exit_code == 2
        assert request_of(name)["trim_revision"] == 0


def test_limit_keeps_guarantee_and_priority():
    with Instance(**DEVICE) as one:
        kvctl("set", one.name, "--min", "8M", "--priority", "3", "--wait", "300")
        done = kvctl("limit", one.name, "32M", "--wait", "300")
        assert done.stdout == (
            f"{one.name}: limit 32.00 MiB (33554432 bytes) applied; 0 B are mapped.\n"
        )
        assert (row(one.name)["min_bytes"], row(one.name)["priority"]) == (8 * MIB, 3)


PAGE = PAGE_BYTES // MIB
IN_PAGES = {
    "whole pages": (("--limit", f"{4 * PAGE}M"), "applied; 0 B are mapped"),
    "part of a page more": (
        ("--limit", f"{4 * PAGE + 1}M"),
        f"limit {4 * PAGE + 1}.00 MiB ({(4 * PAGE + 1) * MIB} bytes) applied; in whole pages the"
        f" limit is {4 * PAGE}.00 MiB (4 pages of {PAGE}.00 MiB); 0 B are mapped",
    ),
    "less than one page": (
        ("--limit", "1M"),
        f"limit 1.00 MiB (1048576 bytes) applied; in whole pages the limit is {PAGE}.00 MiB"
        " (1 page, which is the least); 0 B are mapped",
    ),
    "nothing": (("--limit", "0"), f"the limit is {PAGE}.00 MiB (1 page, which is the least); 0 B"),
    "none": (("--limit", "none"), "no limit applied; 0 B are mapped"),
    "more than the device": (("--limit", "8T"), "applied, but its device has only"),
}


@pytest.mark.parametrize(("words", "said"), IN_PAGES.values(), ids=IN_PAGES)
def test_rounded_limit_is_also_reported_in_whole_pages(words, said) -> None:
    with Instance(**DEVICE) as one:
        result = kvctl("set", one.name, *words, "--wait", "300")
        assert result.exit_code == 0, result.stderr
        assert said in result.stdout
        assert result.stdout.count("whole pages") == said.count("whole pages") or said.startswith(
            "the limit"
        )


def test_limit_set_while_asleep_is_reported_in_pages() -> None:
    with Instance(**DEVICE) as one:
        assert kvctl("sleep", one.name, "--wait", "300").exit_code == 0
        result = kvctl("limit", one.name, "5M", "--wait", "300")
        assert "in whole pages the limit is 4.00 MiB (2 pages of 2.00 MiB)" in result.stdout
        woken = kvctl("wake", one.name, "--wait", "300").stdout
        assert "its limit is 5.00 MiB (4.00 MiB in whole pages)" in woken


def test_reached_limit_below_whole_pages_shows_100_percent() -> None:
    with Instance(**DEVICE) as one:
        assert kvctl("limit", one.name, "5M", "--wait", "300").exit_code == 0
        one.ask("alloc", 2 * BLOCKS_PER_PAGE - 1)
        (line,) = [line for line in kvctl("list").stdout.splitlines() if one.name in line]
        assert "100%" in line.split()
        said = kvctl("explain", one.name).stdout
        assert "Its limit of 5.00 MiB (4.00 MiB in whole pages) is reached" in said


def test_one_page_above_smaller_limit_shows_100_percent() -> None:
    with Instance(**DEVICE) as one:
        assert kvctl("limit", one.name, "0", "--wait", "300").exit_code == 0
        one.ask("alloc", BLOCKS_PER_PAGE - 1)
        (line,) = [line for line in kvctl("list").stdout.splitlines() if one.name in line]
        assert "100%" in line.split()
        said = kvctl("explain", one.name).stdout
        assert "Its limit of 0 B (2.00 MiB: one page is the least) is reached" in said
