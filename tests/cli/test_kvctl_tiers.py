"""kvctl tiers on a real instance over a real pool with a disk tier, and what it leaves."""

from __future__ import annotations

import io
import json
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from called_kvctl import kvctl
from click.shell_completion import ShellComplete
from click.testing import Result
from msgspec.structs import asdict, replace
from rich.console import Console
from segment_owner import Owner
from tiers_instance import Instance
from waiting import DEADLINE_S, wait_until

from kvelastic.cli.kvctl import main
from kvelastic.cli.kvtop.poller import look
from kvelastic.cli.rendering.tables import rich_table
from kvelastic.cli.rendering.tier_tables import BLOCK_WORDS, plain_tables, rich_tables
from kvelastic.controller.models import instance_memory
from kvelastic.doctor.judge_instance import explain_tiers
from kvelastic.errors import SegmentError
from kvelastic.instance.reading import look_at
from kvelastic.instance.row import Row, row_of, tier_rows
from kvelastic.instance.status import status_of
from kvelastic.shared import segment, tier_status
from kvelastic.shared.segment_listing import SHM_DIR
from kvelastic.shared.tier_status import (
    BlockCounts,
    TierAck,
    TierRequest,
    TiersStatus,
    TierStatus,
    ask,
    read,
)
from kvelastic.units import format_size

MIB = 1 << 20


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Instance]:
    instance = Instance(tmp_path / "disk")
    yield instance
    assert instance.end() == 0
    assert not instance.status_file.exists()
    assert read_or_none(instance) is None


def read_or_none(instance: Instance) -> object:
    try:
        return read(instance.info)
    except SegmentError:
        return None


def tiers(*arguments: str) -> Result:
    return kvctl("tiers", *arguments)


def done(*arguments: str) -> str:
    result = tiers(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def said(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done(*arguments, "--wait", str(DEADLINE_S), "--json"))
    return found


def shown(name: str) -> dict[str, Any]:
    (instance,) = json.loads(done(name, "--json"))
    (tier,) = instance["tiers"]
    return {**instance, **tier, "name": instance["name"]}


def shown_tiers(name: str) -> list[dict[str, Any]]:
    (instance,) = json.loads(done(name, "--json"))
    tiers: list[dict[str, Any]] = instance["tiers"]
    return tiers


def used(told: dict[str, Any]) -> int:
    size_bytes: int = told["tiers"][0]["used_bytes"]
    assert size_bytes > 0
    return size_bytes


@pytest.mark.slow
def test_shown_statistics_match_the_tiers(one: Instance) -> None:
    figures = shown(one.name)
    assert figures["name"] == one.name
    assert (figures["tier"], figures["kind"], figures["state"]) == ("disk", "disk", "ok")
    assert figures["policy"] == "write_back"
    answer = said("verify", one.name)
    assert answer == {
        "name": one.name,
        "state": "done",
        "records": {"disk": one.records},
        "reason": "",
    }
    figures = shown(one.name)
    assert (figures["records"], figures["puts"]) == (one.records, one.records)
    assert (figures["limit_bytes"], figures["errors"]) == (32 * MIB, 0)
    assert figures["served"] == one.records
    assert figures["used_bytes"] >= one.records * 64 << 10
    lines = done(one.name).splitlines()
    assert lines[0].split()[:5] == ["NAME", "TIER", "STATE", "USED", "LIMIT"]
    assert lines[1].split()[:3] == [one.name, "disk", "ok"]
    # A status file that came in between is newer: these figures have been final since `verify`.
    became = dict(zip(lines[-2].split(), lines[-1].split(), strict=True))
    assert (became["NAME"], became["POLICY"]) == (one.name, "write_back")
    assert (became["FOUND"], became["DEMOTED"], became["DROPPED"]) == ("0", "0", "0")
    assert became["COPIED_ON_DEMAND"] == str(one.records)
    assert one.name in done()
    assert done("show", one.name).splitlines()[0] == lines[0]


@pytest.mark.slow
def test_limit_and_trim_bound_the_tier(one: Instance) -> None:
    limit = said("limit", one.name, "disk", "2M")
    figures = shown(one.name)
    assert limit["records"]["disk"] == figures["records"] < one.records
    assert figures["limit_bytes"] == 2 * MIB
    assert 0 < figures["used_bytes"] <= 2 * MIB
    trim = said("trim", one.name, "disk", "512K")
    figures = shown(one.name)
    assert trim["records"]["disk"] == figures["records"]
    assert figures["used_bytes"] <= MIB // 2
    assert figures["limit_bytes"] == 2 * MIB, "a trim has changed the limit"
    text = done("limit", one.name, "disk", "1G", "--wait", str(DEADLINE_S))
    assert text.startswith(f"{one.name}: disk holds at most 1.00 GiB now, and ")
    assert shown(one.name)["limit_bytes"] == 1 << 30


@pytest.mark.slow
def test_erase_reports_the_number_of_objects(one: Instance) -> None:
    assert said("erase", one.name, "--older-than", "7d")["records"] == {"disk": 0}
    assert said("erase", one.name, "--model", "another")["records"] == {"disk": 0}
    # As Python reads an argument that is not UTF-8.
    assert said("erase", one.name, "--model", "another\udcff")["records"] == {"disk": 0}
    assert said("verify", one.name)["records"] == {"disk": one.records}
    assert said("erase", one.name, "--model", "embedded")["records"] == {"disk": one.records}
    assert said("clear", one.name, "--yes")["records"] == {"disk": 0}
    assert shown(one.name)["records"] == 0


@pytest.mark.slow
def test_clear_needs_yes_and_erases_everything(one: Instance) -> None:
    refused = tiers("clear", one.name)
    assert (refused.exit_code, "add --yes" in refused.stderr) == (2, True)
    text = done("clear", one.name, "--yes", "--wait", str(DEADLINE_S))
    assert text == f"{one.name}: {one.records} records erased (disk {one.records}).\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("limit", "NAME", "tape", "1G"), 1, "has no tier 'tape'; it has disk"),
        (("trim", "NAME", "tape", "1G"), 1, "has no tier 'tape'; it has disk"),
        (("limit", "NAME", "disk", "much"), 2, "is not understood"),
        (("limit", "NAME", "disk", "-1"), 2, "a negative value is not accepted"),
        (("limit", "NAME", "disk", "0.5"), 2, "a fraction of a byte"),
        (("limit", "NAME", "disk", "1"), 1, "1 B holds no record; the least that does is"),
        (("limit", "NAME", "disk", "0"), 1, "0 B holds no record; the least that does is"),
        (("erase", "NAME"), 2, "say what to erase"),
        (("erase", "NAME", "--older-than", "7"), 2, "is not an age; write 90s, 15m, 12h or 7d"),
        (("erase", "NAME", "--older-than", "-1"), 2, "is not an age"),
        (("erase", "NAME", "--older-than", "0"), 2, "is not an age"),
        (("erase", "NAME", "--older-than", "nan"), 2, "is not an age"),
        (("erase", "NAME", "--older-than", "1e300d"), 2, "is not an age"),
        (("erase", "NAME", "--older-than", "9999999d"), 2, "at most 3650d"),
        (("erase", "NAME", "--model", ""), 2, "nothing was asked"),
        (("nobody",), 1, "no segment is called 'nobody'. Known names"),
        (("verify", "nobody"), 1, "no segment is called 'nobody'. Known names"),
    ],
)
def test_invalid_tier_commands_change_nothing(
    shared: Instance, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = tiers(*(shared.name if part == "NAME" else part for part in arguments))
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
    assert said("verify", shared.name)["records"] == {"disk": shared.records}
    assert shown(shared.name)["limit_bytes"] == 32 * MIB


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = Instance(tmp_path_factory.mktemp("shared") / "disk")
    yield instance
    assert instance.end() == 0


def test_instance_without_tiers_error_names_the_variable() -> None:
    name = f"kvtiers_none_{os.getpid()}"
    with segment.create(name, engine="test"):
        for arguments in ((name,), ("verify", name), ("clear", name, "--yes")):
            result = tiers(*arguments)
            assert (result.exit_code, "KVELASTIC_TIERS gives" in result.stderr) == (1, True)
        assert json.loads(done("--json")) == [] or name not in done("--json")


@pytest.mark.slow
def test_concurrent_requests_get_their_own_results(one: Instance) -> None:
    answers: dict[int, TierAck | None] = {}

    def operate(number: int) -> None:
        request = (
            TierRequest("limit", "disk", (number + 1) * MIB)
            if number % 2
            else TierRequest("erase", model="another")
        )
        answers[number] = ask(one.info, request, DEADLINE_S)

    threads = [threading.Thread(target=operate, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.revision for answer in answers.values() if answer}) == len(threads)
    for number, answer in answers.items():
        assert answer is not None
        assert answer.state == "done"
        # Of a limit: what is held; of this erasure: nothing.
        assert (answer.counts[0] == 0) == (number % 2 == 0)


@pytest.mark.slow
def test_corrupt_status_file_stops_neither_kvctl_nor_instance(one: Instance) -> None:
    dice = random.Random(5)
    header = tier_status.KIND.header
    for _ in range(30):
        with one.status_file.open("r+b") as file:
            file.seek(dice.randrange(len(header), tier_status.KIND.file_bytes - 600))
            file.write(dice.randbytes(600))
        for arguments in ((one.name,), ("limit", one.name, "disk", "16M", "--wait", "0")):
            assert tiers(*arguments).exit_code in {0, 1, 3}
    assert one.process.poll() is None
    while read_or_none(one) is None:  # until it is written again
        assert one.process.poll() is None
    # The requests above may fill the ring until the instance has answered them.
    wait_until(lambda: tiers("verify", one.name, "--wait", str(DEADLINE_S)).exit_code == 0)
    assert shown(one.name)["limit_bytes"] in {16 * MIB, 32 * MIB}


@pytest.mark.slow
def test_status_file_of_killed_instance_is_removed(tmp_path: Path) -> None:
    one = Instance(tmp_path / "disk")
    assert one.status_file.exists()
    one.process.kill()
    one.end()
    assert one.status_file.exists(), "nobody has reaped it yet"
    result = tiers(one.name)
    assert (result.exit_code, "has ended" in result.stderr) == (1, True)
    assert not one.status_file.exists()
    assert not (SHM_DIR / one.name).exists()
    again = Instance(tmp_path / "disk")
    assert said("verify", again.name)["records"] == {"disk": again.records}
    assert again.end() == 0


def test_the_shell_completes_names_tiers_and_commands(shared: Instance) -> None:
    def offered(*words: str) -> set[str]:
        *before, word = words
        complete = ShellComplete(main, {}, "kvctl", "")
        return {item.value for item in complete.get_completions(["tiers", *before], word)}

    assert {"limit", "trim", "clear", "erase", "verify", shared.name} <= offered("")
    assert offered("limit", shared.name[:12]) == {shared.name}
    assert offered("limit", shared.name, "") == {"disk"}
    assert offered("limit", "nobody", "") == set()


def test_metrics_have_every_tier(shared: Instance) -> None:
    result = kvctl("metrics")
    assert result.exit_code == 0
    labels = f'{{name="{shared.name}",tier="disk"}}'
    assert (
        f"kvelastic_tier_limit_bytes{labels} {float(32 * MIB)!r}".replace(
            "33554432.0", "3.3554432e+07"
        )
        in result.stdout
    )
    assert f"kvelastic_tier_records{labels} {float(shared.records)}" in result.stdout
    assert f'kvelastic_tiers_blocks_served_total{{name="{shared.name}"}}' in result.stdout


def test_list_shows_tier_usage(shared: Instance) -> None:
    (row,) = json.loads(kvctl("list", shared.name, "--json").stdout)
    assert row["tiers"] == shown_tiers(shared.name)
    assert set(row["tiers"][0]) == {"state", *TierStatus.__struct_fields__}
    heading, line = kvctl("list", shared.name).stdout.splitlines()
    at = heading.index("TIERS")
    assert line[at : heading.index("MODEL")].rstrip() == f"disk {format_size(used(row))}"


def status_of_a_stuck_disk() -> TiersStatus:
    """Its counts are 0, 1, 2 and so on, in the order of their names."""
    figures: Callable[..., TierStatus] = TierStatus
    stuck = figures("disk", "disk", *range(16), is_stuck=True, is_current=True)
    return TiersStatus(1, 0, "write_back", BlockCounts(*range(11)), (stuck,))


def test_tiers_column_needs_wide_terminal_and_tiers() -> None:
    status_file = status_of_a_stuck_disk()
    info = segment.SegmentInfo("a", "unreadable", problem="p")
    known = row_of(status_of(info)) | {"tiers": tier_rows(status_file)}

    def drawn(rows: list[Row], width: int) -> str:
        screen = io.StringIO()
        Console(width=width, file=screen, force_terminal=False).print(rich_table(rows, width))
        return screen.getvalue()

    assert "disk 0 B stuck" in drawn([known], 160)
    assert "Tiers" not in drawn([known], 100)
    assert "Tiers" not in drawn([row_of(status_of(info))], 160)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_of_tiers_fit_the_terminal(width: int) -> None:
    status_files = {"a": status_of_a_stuck_disk(), "a_second_instance": status_of_a_stuck_disk()}
    screen = io.StringIO()
    Console(width=width, file=screen, force_terminal=False).print(rich_tables(status_files, width))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[:2] for line in lines if "Name" in line] == [
        ["Name", "Tier"],
        ["Name", "Found" if width < 200 else "Policy"],
    ]
    assert ("Copied ahead" in screen.getvalue()) == (width == 200)


def test_block_counts_match_their_column_headings() -> None:
    *_, headings, line = plain_tables({"a": status_of_a_stuck_disk()}).splitlines()
    found = dict(zip(headings.split(), line.split(), strict=True))
    assert found == {
        "NAME": "a", "POLICY": "write_back", "FOUND": "0", "NOT_FOUND": "1", "LOADED": "2",
        "NOT_LOADED": "3", "COPIED_ON_DEMAND": "4", "COPIED_AHEAD": "5", "REFUSED": "6",
        "TIMED_OUT": "7", "CHANGED": "8", "DEMOTED": "9", "DROPPED": "10",
    }  # fmt: skip
    assert set(BLOCK_WORDS) == set(BlockCounts.__struct_fields__)


def test_stats_shows_every_tier_statistic(shared: Instance) -> None:
    told = json.loads(kvctl("stats", shared.name, "--json").stdout)
    (status_file,) = json.loads(done(shared.name, "--json"))
    assert told["tiers"] == status_file["tiers"]
    assert told["tier_policy"] == "write_back"
    assert told["tier_blocks"] == {key: status_file[key] for key in told["tier_blocks"]}
    assert set(told["tier_blocks"]) == set(BlockCounts.__struct_fields__)
    text = kvctl("stats", shared.name).stdout
    (tier,) = re.findall(r"\nTier disk\n((?:  .*\n)+)", text)
    assert re.search(rf"  used +{re.escape(format_size(used(told)))}\n", tier)
    assert re.search(rf"  records +{shared.records}\n", tier)
    assert re.search(r"  limit +32\.00 MiB\n", tier)
    assert re.search(r"\nBlocks and tiers, write_back\n  found +0\n", text)


def test_all_views_show_the_same_tier_statistics(shared: Instance) -> None:
    listed = shown_tiers(shared.name)
    assert look_at(shared.name).shown_tiers is not None
    assert instance_memory.row(shared.name)["tiers"] == listed
    (row,) = (row for row in instance_memory.rows_and_devices()[0] if row["name"] == shared.name)
    assert row["tiers"] == listed
    (top,) = look([shared.name]).instances
    assert [asdict(tier) | {"state": tier.state} for tier in top.tiers] == listed
    assert top.tiers_bytes == listed[0]["used_bytes"]


@pytest.mark.parametrize("command", ["limit", "trim"])
def test_fractional_size_without_unit_is_refused(shared: Instance, command: str) -> None:
    result = tiers(command, shared.name, "disk", "0.5")
    assert result.exit_code == 2
    assert "size '0.5' is a fraction of a byte; write whole bytes, or a larger unit (0.5G)" in (
        result.stderr
    )
    (tier,) = shown_tiers(shared.name)
    assert (tier["limit_bytes"], tier["records"]) == (32 * MIB, shared.records)


def test_stats_of_instance_without_tiers_has_no_tiers() -> None:
    with Owner(f"kvtiers_none_{os.getpid()}") as owner:
        told = json.loads(kvctl("stats", owner.name, "--json").stdout)
        assert (told["tiers"], told["tier_policy"], told["tier_blocks"]) == ([], None, None)
        assert "Tier" not in kvctl("stats", owner.name).stdout


def test_explain_shows_tier_usage(shared: Instance) -> None:
    result = kvctl("explain", shared.name)
    assert result.exit_code == 0
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("  tiers "))
    assert f"Tiers store {shared.records} blocks on disk (" in line
    assert " of 32.00 MiB)." in line
    assert "Since the start, requests loaded " in line


@pytest.mark.slow
def test_unusable_tier_folder_is_reported_everywhere(one: Instance, tmp_path: Path) -> None:
    for path in (tmp_path / "disk").iterdir():
        path.unlink()
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").symlink_to("/proc/kvelastic")
    wait_until(lambda: shown(one.name)["state"] == "failing")
    reason = shown(one.name)["problem"]
    assert "is a link" in reason
    assert "failing" in done(one.name)
    (line,) = (
        line["what"]
        for line in json.loads(kvctl("explain", one.name, "--json").stdout)["lines"]
        if "failing" in line["what"]
    )
    assert reason in line
    (finding,) = (
        finding
        for finding in json.loads(kvctl("doctor", "--json").stdout)
        if finding["check"] == "instances.tiers" and one.name in finding["what"]
    )
    assert (finding["state"], reason in finding["what"]) == ("problem", True)


def test_explain_shows_failing_tiers_and_exhausted_budget() -> None:
    status_file = status_of_a_stuck_disk()
    kept, stuck = explain_tiers(status_file)
    assert "Evicted blocks: 19, of which 9 have a copy in a tier." in kept.what
    assert kept.what.endswith("loaded 2 blocks from tiers and computed 3 that could not be loaded.")
    assert "dropped" in kept.do
    assert stuck.what.startswith("disk does not respond")
    assert "9 calls to it failed" in stuck.what
    full = replace(status_file.tiers[0], is_stuck=False, write_left_bytes=0)
    refuses = replace(
        status_file.tiers[0], is_stuck=False, problem="[Errno 30] Read-only file system"
    )
    _, failing = explain_tiers(replace(status_file, tiers=(refuses,)))
    assert failing.what.startswith("disk is failing: [Errno 30] Read-only file system. 9 calls")
    assert failing.do.startswith("repair the medium of disk")
    _, budget = explain_tiers(replace(status_file, tiers=(full,)))
    assert "until midnight UTC" in budget.what
    assert list(explain_tiers(None)) == []


def test_every_command_has_help() -> None:
    group = main.get_command(click.Context(main), "tiers")
    assert isinstance(group, click.Group)
    for name in group.commands:
        assert tiers(name, "--help").exit_code == 0
    assert "Commands:" in done("--help")
