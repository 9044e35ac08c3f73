"""kvctl sleep and wake on real instances, and where other commands show who sleeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from called_kvctl import kvctl
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from msgspec.structs import replace
from segment_owner import Owner

from kvelastic.cli.commands.shell import Shell
from kvelastic.cli.kvctl import main
from kvelastic.cli.rendering.tables import plain_table
from kvelastic.instance.row import Row, shown_state
from kvelastic.shared import segment
from kvelastic.shared.segment_listing import tier_status_name
from kvelastic.shared.status_file import StatusFile
from kvelastic.shared.tier_status import KIND, BlockCounts, TiersStatus, TierStatus

MIB = 1 << 20
HOST = TierStatus(
    "host", "host", 10, None, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, None, None, None, 0, False, True
)
KVCTL = str(Path(sys.executable).with_name("kvctl"))
DEVICE = {
    "KVELASTIC_HOST_MEMORY": "64M",
    "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    "KVELASTIC_IDLE_TRIM_SECONDS": "3600",
}


@pytest.fixture
def one(answered):
    with Instance(**DEVICE) as instance:
        yield instance


def done(*arguments: str) -> str:
    result = kvctl(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def row(name: str) -> dict:
    return json.loads(done("list", name, "--json"))[0]


# ----------------------------------------------------------------------------- sleep and wake


def test_sleep_releases_all_memory_and_reports_bytes(one):
    one.cache(one.alloc(3 * BLOCKS_PER_PAGE - 1))
    assert one.mapped_bytes == 3 * PAGE_BYTES
    assert done("sleep", one.name, "--wait", "300") == (
        f"{one.name} is asleep; 6.00 MiB (6291456 bytes) were given back; 0 B are mapped.\n"
    )
    assert one.mapped_bytes == one.ask("granted") == 0
    assert one.alloc(1) is None
    entry = row(one.name)
    assert (entry["asleep"], entry["state"], entry["mapped_bytes"]) == (True, "applied", 0)
    assert done("wake", one.name, "--wait", "300") == (
        f"{one.name} is awake; its limit is 64.00 MiB, and 0 B are mapped.\n"
    )
    assert row(one.name)["asleep"] is False
    assert one.alloc(1) == [1]


def test_sleep_reports_bytes_pending_for_lower_tiers(one):
    host = replace(HOST, waiting_bytes=0)
    disk = replace(HOST, tier="disk", kind="disk", waiting_bytes=3 * MIB)
    after = time.time_ns() + 10**15  # no figures from before the sleep
    status_file = StatusFile.create(
        tier_status_name(segment.inspect(one.name).header["uuid"]), KIND
    )
    try:
        status_file.publish(
            TiersStatus(after, 0, "write_back", BlockCounts(*range(11)), (host, disk))
        )
        assert done("sleep", one.name, "--wait", "300") == (
            f"{one.name} is asleep; 0 B are mapped. Still being written: 3.00 MiB to disk;"
            f" `kvctl tiers {one.name}` shows what is left.\n"
        )
        shown = done("tiers", one.name).splitlines()
        assert [line.split()[-2:] for line in shown[1:3]] == [["0", "B"], ["3.00", "MiB"]]
        status_file.publish(TiersStatus(after, 0, "write_back", BlockCounts(*range(11)), (host,)))
        assert done("sleep", one.name, "--wait", "300") == (
            f"{one.name} is asleep already; 0 B are mapped.\n"
        )
    finally:
        status_file.close()


@pytest.mark.slow
def test_sleep_waits_for_blocks_in_use(one):
    ids = one.alloc(2 * BLOCKS_PER_PAGE - 1)
    late = kvctl("sleep", one.name, "--wait", "0.05")
    assert (late.exit_code, late.stdout) == (3, "")
    assert late.stderr == (
        f"Error: {one.name} hands out nothing; 4.00 MiB are held still, 3.50 MiB of that in blocks"
        " that requests use, and go when those end; it was not asleep after 0.05 s.\n"
    )
    assert one.alloc(1) is None, "it hands out blocks on its way to sleep"
    assert (row(one.name)["state"], row(one.name)["asleep"]) == ("shrinking", True)
    again = done("sleep", one.name)  # who does not wait hears the same, and it is no error
    assert "hands out nothing already; 4.00 MiB are held still" in again
    one.free(ids)
    assert done("sleep", one.name, "--wait", "300") == (
        f"{one.name} is asleep already; 0 B are mapped.\n"
    )


def test_sleep_and_wake_are_idempotent(one):
    assert done("wake", one.name, "--wait", "300") == (
        f"{one.name} is awake already; its limit is 64.00 MiB, and 0 B are mapped.\n"
    )
    done("sleep", one.name, "--wait", "300")
    assert "is asleep already; 0 B are mapped" in done("sleep", one.name, "--wait", "300")
    done("wake", one.name, "--wait", "300")
    assert "is awake already" in done("wake", one.name)


def test_limit_set_while_asleep_applies_after_wake(one):
    done("set", one.name, "--limit", "32M", "--min", "4M", "--priority", "3", "--wait", "300")
    done("sleep", one.name, "--wait", "300")
    assert (row(one.name)["limit_bytes"], row(one.name)["effective_limit_bytes"]) == (32 * MIB, 0)
    assert done("limit", one.name, "16M", "--wait", "300") == (
        f"{one.name}: limit 16.00 MiB (16777216 bytes) applied; it is asleep until"
        f" `kvctl wake {one.name}`.\n"
    )
    entry = row(one.name)
    assert (entry["asleep"], entry["limit_bytes"], entry["mapped_bytes"]) == (True, 16 * MIB, 0)
    assert (entry["min_bytes"], entry["priority"]) == (4 * MIB, 3)
    assert "its limit is 16.00 MiB" in done("wake", one.name, "--wait", "300")
    assert row(one.name)["effective_limit_bytes"] == 16 * MIB
    assert one.ask("available") == 16 * MIB // PAGE_BYTES * BLOCKS_PER_PAGE - 1


@pytest.mark.slow
def test_limit_during_sleep_transition_reports_both_states(one):
    one.alloc(1)
    done("sleep", one.name)
    late = kvctl("limit", one.name, "16M", "--wait", "0.05")
    assert late.exit_code == 3
    assert "accepted; it is asleep, and 2.00 MiB are still to be given back" in late.stderr
    assert "2.00 MiB of one that is asleep and still to be" in done("trim", one.name)


@pytest.mark.slow
def test_default_limit_is_still_shown_while_asleep(one):
    before = row(one.name)["limit_bytes"]
    assert before == 64 * MIB
    done("sleep", one.name, "--wait", "300")
    assert row(one.name)["limit_bytes"] == before
    done("wake", one.name, "--wait", "300")
    assert row(one.name)["limit_bytes"] == before


@pytest.mark.slow
def test_wake_over_the_limit_exits_3(one):
    one.alloc(3 * BLOCKS_PER_PAGE - 1)
    done("sleep", one.name)
    done("limit", one.name, "2M")
    late = kvctl("wake", one.name, "--wait", "0.05")
    assert late.exit_code == 3
    assert "is awake; its limit is 2.00 MiB, and 4.00 MiB are still to be given" in late.stderr
    assert row(one.name)["asleep"] is False


def test_instance_without_sleep_support_is_reported_awake(name, answered):
    """It answers `applied` to every request, and goes on as before."""
    with Owner(name):
        result = kvctl("sleep", name, "--wait", "300")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{name}: sleep not taken by the instance; it is awake." in result.stderr
        assert kvctl("sleep", name).exit_code == 1
        assert "is awake already; its limit is 4.00 GiB" in done("wake", name, "--wait", "300")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_sleep_and_wake_without_reply_exit_3(name, verb):
    with Owner(name, "mute"):
        waited = kvctl(verb, name, "--wait", "0.05")
        assert waited.exit_code == 3
        said = f"{name}: {verb} requested; no reply yet"
        assert f"{said} after 0.05 s." in waited.stderr
        assert done(verb, name) == f"{said}.\n"


def answer(**changes: object) -> segment.Ack:
    values: dict[str, object] = {
        "revision": 5,
        "state": "applied",
        "effective_limit_bytes": MIB,
        "mapped_bytes": 0,
        "over_bytes": 0,
        "reason": "",
        "acknowledged_ns": 1,
        "min_bytes": 0,
        "priority": 0,
        "requested_revision": 5,
    }
    return segment.Ack(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"revision": 6}, 1, "sleep was replaced by a later request; it is awake"),
        ({"revision": 6, "asleep": True}, 0, "is asleep; "),
        ({"revision": 6, "asleep": True, "state": "refused"}, 0, "is asleep; "),
        ({"state": "refused", "reason": "no\x1b[2J"}, 1, "sleep refused: no\ufffd[2J"),
        ({"state": "failed", "reason": "no device"}, 1, "has failed: no device"),
        (
            {"asleep": True, "state": "shrinking", "mapped_bytes": MIB, "reason": "busy\x1b"},
            3,
            "1.00 MiB are held still (busy\ufffd)",
        ),
    ],
)
def test_sleep_outcome_follows_the_final_state(name, monkeypatch, changes, code, text):
    """What has become of it counts, and not which request was answered last."""
    with Owner(name):
        monkeypatch.setattr(segment, "request", lambda *_, **__: answer(**changes))
        result = kvctl("sleep", name, "--wait", "1")
        assert result.exit_code == code
        assert text in result.output + result.stderr


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_unknown_and_dead_instances_exit_1(name, verb):
    missing = kvctl(verb, "no_such_instance")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "no segment is called 'no_such_instance'" in missing.stderr
    with Owner(name) as owner:
        owner.kill()
        died = kvctl(verb, name, "--wait", "5")
        assert died.exit_code == 1
        assert "has ended" in died.stderr


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_wrong_usage_changes_nothing(name, verb):
    with Owner(name):
        for more in ((), (name, "5"), (name, "--wait", "-1"), (name, "--wait"), (name, "--now")):
            assert kvctl(verb, *more).exit_code == 2, more
        assert segment.inspect(name).request["revision"] == 0


@pytest.mark.slow
def test_shell_runs_and_completes_sleep_and_wake(one):
    lines = f"sleep {one.name} --wait 300\nlist {one.name}\nwake {one.name} --wait 300\n"
    shell = subprocess.run([KVCTL, "shell"], input=lines, capture_output=True, text=True)
    assert (shell.returncode, shell.stderr) == (0, "")
    said, _, listed, woken = shell.stdout.splitlines()
    assert said.endswith(" is asleep; 0 B are mapped.")
    assert listed.split()[:2] == [one.name, "asleep"]
    assert " is awake; " in woken
    assert isinstance(main, click.Group)
    words = Shell(main)
    assert words.complete("", "sl") == ["sleep"]
    assert words.complete("", "wa") == ["wake", "watch"]
    assert words.complete("wake ", one.name[:-1]) == [one.name]
    assert "--wait" in words.complete(f"sleep {one.name} ", "--")


# ----------------------------------------------------------------------------- where it is shown


@pytest.mark.slow
def test_list_watch_and_stats_show_asleep(one):
    one.cache(one.alloc(4))
    done("limit", one.name, "32M", "--wait", "300")
    assert "asleep" not in done("list", one.name)
    done("sleep", one.name, "--wait", "300")
    for shown in (done("list", one.name), done("watch", one.name, "--count", "1")):
        (line,) = (line for line in shown.splitlines() if line.startswith(one.name))
        assert line.split()[1:6] == ["asleep", "32.00", "MiB", "0", "B"]
    (entry,) = json.loads(done("watch", one.name, "--count", "1", "--json"))
    assert entry["asleep"] is True
    stats = json.loads(done("stats", one.name, "--json"))
    assert (stats["asleep"], stats["blocks_available"]) == (True, 0)
    lines = done("stats", one.name).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  asleep")] == ["yes"]
    done("wake", one.name, "--wait", "300")
    lines = done("stats", one.name).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  asleep")] == ["no"]


@pytest.mark.slow
def test_wake_reports_that_the_engine_still_sleeps(one):
    """The controller puts both to sleep; kvctl wakes the memory, and requests wait all the same."""
    assert row(one.name)["engine_asleep"] is None
    one.ask("engine_sleeps", True)
    done("sleep", one.name, "--wait", "300")
    told = done("limit", one.name, "16M", "--wait", "300")
    assert f"`kvctl wake {one.name}` alone is not enough" in told
    told = done("wake", one.name, "--wait", "300")
    assert "is awake" in told
    assert "but its engine sleeps" in told
    assert (row(one.name)["asleep"], row(one.name)["engine_asleep"]) == (False, True)
    assert done("list", one.name).splitlines()[1].split()[1] == "asleep"
    assert "Its engine is asleep, but the instance is awake" in done("explain", one.name)
    (metric,) = re.findall(rf"kvelastic_instance_engine_asleep.*{one.name}.*", done("metrics"))
    assert metric.endswith(" 1.0")
    one.ask("engine_sleeps", False)
    done("sleep", one.name, "--wait", "300")
    assert "Its engine is awake" in done("explain", one.name)
    assert "engine" not in done("wake", one.name, "--wait", "300")
    assert done("list", one.name).splitlines()[1].split()[1] == "applied"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "asleep", "shown"),
    [
        ("applied", True, "asleep"),
        ("applied", False, "applied"),
        ("shrinking", True, "shrinking"),
        ("refused", True, "refused"),
        ("dead", True, "dead"),
        ("unreadable", None, "unreadable"),
    ],
)
def test_table_shows_asleep_for_applied_sleep_only(one, state, asleep, shown):
    entry: Row = row(one.name) | {"state": state, "asleep": asleep}
    assert shown_state(entry) == shown
    assert plain_table([entry]).splitlines()[1].split()[1] == shown


@pytest.mark.slow
def test_explain_shows_sleep_and_how_to_wake(one):
    done("set", one.name, "--min", "8M", "--limit", "32M", "--wait", "300")
    ids = one.alloc(4)
    done("sleep", one.name)
    falling = done("explain", one.name)
    assert (
        "It is going to sleep: it allocates no blocks, and releases the remaining 4.00 MiB"
        in falling
    )
    assert f"-> wait, or run kvctl wake {one.name}" in falling
    one.free(ids)
    done("sleep", one.name, "--wait", "300")
    told = json.loads(done("explain", one.name, "--json"))
    assert (told["asleep"], told["limit_bytes"], told["room_bytes"]) == (True, 32 * MIB, 0)
    assert told["effective_limit_bytes"] == 0
    (line,) = (line for line in told["lines"] if line["about"] == "asleep")
    assert line["is_blocked"]
    assert "It is asleep: it allocates no blocks, and new requests wait" in line["what"]
    assert line["do"].startswith(f"run kvctl wake {one.name}")
    said = [line["what"] for line in told["lines"]]
    assert "Its limit is 32.00 MiB when it wakes." in said
    assert not [what for what in said if "limit of 0 B" in what], "0 B is no limit of anybody's"
    assert [what for what in said if "requests its guarantee of 8.00 MiB; until then" in what], said
    done("wake", one.name, "--wait", "300")
    told = json.loads(done("explain", one.name, "--json"))
    assert "asleep" not in [line["about"] for line in told["lines"]]
    assert not any(line["is_blocked"] for line in told["lines"])
