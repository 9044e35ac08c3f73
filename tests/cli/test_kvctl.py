"""kvctl: exit codes, messages and screens, against real instances in other processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from called_kvctl import kvctl
from ledger_instance import Instance
from processes import run_python
from segment_owner import CAPACITY_BYTES, MAPPED_BYTES, Owner
from terminal import written_to_a_terminal
from waiting import DEADLINE_S

from kvelastic.cli.kvctl import main
from kvelastic.cli.rendering.tables import bar_cells, plain_table, rich_table
from kvelastic.instance.row import Row, printable, row_of
from kvelastic.instance.status import status_of
from kvelastic.shared import segment

SHM = Path("/dev/shm")
KVCTL = str(Path(sys.executable).with_name("kvctl"))


def row(name: str) -> Row:
    rows = json.loads(kvctl("list", "--json").stdout)
    return next(entry for entry in rows if entry["name"] == name)


def revision(name: str) -> int:
    return segment.inspect(name).request["revision"]


# ------------------------------------------------------------------------------------------ list


def test_list_json_has_the_documented_keys(owner):
    entry = row(owner.name)
    assert set(entry) == set(Row.__annotations__)
    documented = (Path(__file__).parents[2] / "docs" / "kvctl.md").read_text()
    assert [key for key in Row.__annotations__ if f"`{key}`" not in documented] == []
    assert entry["ipc"] == entry["name"]
    assert entry["alive"] is True
    assert (entry["state"], entry["revision"]) == ("applied", 0)
    assert entry["limit_bytes"] == entry["capacity_bytes"] == CAPACITY_BYTES
    assert entry["requested_limit_bytes"] is None
    assert entry["mapped_bytes"] == MAPPED_BYTES
    assert entry["used_bytes"] == MAPPED_BYTES - entry["parked_bytes"]
    assert entry["pid"] == owner.pid
    assert (entry["engine"], entry["model"], entry["device"]) == ("test", "none", "host")
    assert len(entry["uuid"]) == 36
    assert entry["created"].endswith("Z")
    assert entry["counters"]["allocs"] == 0


def test_row_shows_guarantee_and_priority_in_force(owner):
    info = segment.inspect(owner.name)
    info.ack.update(min_bytes=3 << 30, priority=-7)
    info.request.update(min_bytes=1, priority=1)  # a request is not what is in force
    entry = row_of(status_of(info))
    assert (entry["min_bytes"], entry["priority"]) == (3 << 30, -7)
    heading, line = plain_table([entry]).splitlines()
    at = heading.split().index("MIN")
    assert heading.split()[at : at + 2] == ["MIN", "PRIO"]
    assert "3.00 GiB    -7" in line


@pytest.mark.slow
def test_guarantee_and_priority_shown_on_wide_terminals_only(owner):
    narrow, wide = (on_terminal(["list", owner.name], columns) for columns in (100, 220))
    assert "Limit" in narrow
    assert "Prio" not in narrow
    assert "Min" in wide
    assert "Prio" in wide


@pytest.mark.slow
def test_list_in_a_pipe_is_plain_text(owner):
    result = subprocess.run([KVCTL, "list", owner.name], capture_output=True, text=True, check=True)
    heading, line = result.stdout.splitlines()
    assert heading.split()[:4] == ["NAME", "STATE", "LIMIT", "MAPPED"]
    assert line.startswith(f"{owner.name}  applied  4.00 GiB  96.00 MiB")
    assert result.stderr == ""


def test_list_without_instances(monkeypatch):
    monkeypatch.setattr(segment, "list_segments", list)
    result = kvctl("list")
    assert (result.exit_code, result.stdout) == (0, "No active kvelastic segments found.\n")
    assert json.loads(kvctl("list", "--json").stdout) == []


def test_list_of_unknown_instance_fails(owner, name):
    result = kvctl("list", "no_such_instance")
    assert result.exit_code == 1
    assert "no_such_instance" in result.stderr
    assert owner.name in result.stderr
    assert result.stdout == ""


def test_list_removes_dead_instance(owner):
    owner.kill()
    result = kvctl("list", "--json")
    assert result.exit_code == 0
    assert owner.name not in result.stdout
    assert f"Removed {owner.name}" in result.stderr
    assert not owner.path.exists()


def test_an_unreadable_segment_is_listed_with_all_keys(name):
    (SHM / name).write_bytes(b"KVELASTC" + (99).to_bytes(4, "little") + bytes(500))
    entry = row(name)
    assert set(entry) == set(Row.__annotations__)
    assert (entry["state"], entry["alive"], entry["pid"]) == ("unreadable", False, None)
    assert "version 99" in entry["reason"]
    assert name in kvctl("list").stdout


# ----------------------------------------------------------------------------------------- limit


@pytest.mark.parametrize(
    ("size", "limit_bytes"),
    [("1.5GiB", 3 << 29), ("64M", 64 << 20), ("2g", 2 << 30), ("4096", 4096), ("0", 0)],
)
def test_limit_sets_the_requested_size(owner, size, limit_bytes):
    result = kvctl("limit", owner.name, size, "--wait", "300")
    assert result.exit_code == 0, result.stderr
    assert f"({limit_bytes} bytes) applied" in result.stdout
    entry = row(owner.name)
    assert entry["limit_bytes"] == entry["requested_limit_bytes"] == limit_bytes
    assert entry["answered_revision"] == entry["revision"] == 1


def test_limit_percent_uses_capacity_of_the_instances_device(owner):
    result = kvctl("limit-percent", owner.name, "25%", "--wait", "300")
    assert result.exit_code == 0, result.stderr
    assert row(owner.name)["limit_bytes"] == CAPACITY_BYTES // 4


@pytest.mark.parametrize("verb", ["limit", "limit-percent"])
def test_unknown_name_exits_1_and_lists_known_names(owner, verb):
    result = kvctl(verb, "no_such_instance", "50")
    assert result.exit_code == 1
    assert "no_such_instance" in result.stderr
    assert f"Known names: {owner.name}" in result.stderr or owner.name in result.stderr
    assert result.stdout == ""


def test_limit_with_a_percentage_suggests_limit_percent() -> None:
    assert "use kvctl limit-percent NAME 80%" in kvctl("limit", "a", "80%").output


def test_command_help_is_not_truncated() -> None:
    for arguments in ((), ("tiers",), ("links",)):
        assert "..." not in kvctl(*arguments, "--help").output.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("limit", "banana"),
        ("limit", "-5"),
        ("limit", "-5G"),
        ("limit", "-.5"),
        ("limit", ""),
        ("limit", "nan"),
        ("limit", "1G", "--wait", "-1"),
        ("limit", "1G", "--wait", "nan"),
        ("limit", "1G", "--wait", "soon"),
        ("limit", "1G", "2G"),
        ("limit", "1G", "--wiat", "5"),
        ("limit",),
        ("limit-percent", "250"),
        ("limit-percent", "-1"),
        ("limit-percent", "half"),
        ("limit-percent", "nan"),
    ],
)
def test_wrong_usage_changes_nothing(owner, arguments):
    verb, *rest = arguments
    result = kvctl(verb, owner.name, *rest)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stderr
    assert revision(owner.name) == 0


def test_negative_size_error_mentions_negative():
    assert "negative" in kvctl("limit", "any", "-5").stderr


def test_refused_limit_exits_1(name, answered):
    with Owner(name, "refuse"):
        waited = kvctl("limit", name, "1G", "--wait", "300")
        assert waited.exit_code == 1
        assert "it is only a test" in waited.stderr
        assert row(name)["state"] == "refused"
        assert row(name)["limit_bytes"] == CAPACITY_BYTES
        unwaited = kvctl("limit", name, "1G")
        assert unwaited.exit_code == 1
        assert "refused" in unwaited.stderr


@pytest.mark.slow
def test_limit_not_reached_in_time_exits_3(name, answered):
    with Owner(name, "shrink"):
        waited = kvctl("limit", name, "1M", "--wait", "0.05")
        assert waited.exit_code == 3
        assert "95.00 MiB are still to be given back after 0.05 s" in waited.stderr
        assert kvctl("limit", name, "1M").exit_code == 0
        entry = row(name)
        assert (entry["state"], entry["over_bytes"]) == ("shrinking", 95 << 20)


@pytest.mark.slow
def test_limit_without_reply_exits_3_and_stays_pending(name):
    with Owner(name, "mute"):
        waited = kvctl("limit", name, "1M", "--wait", "0.05")
        assert waited.exit_code == 3
        assert "no reply yet" in waited.stderr
        unwaited = kvctl("limit", name, "1M")
        assert unwaited.exit_code == 0
        entry = row(name)
        assert entry["state"] == "pending"
        assert entry["requested_limit_bytes"] == 1 << 20
        assert entry["limit_bytes"] == CAPACITY_BYTES


def test_superseded_limit_request_is_reported_as_replaced(name, monkeypatch):
    with Owner(name):
        kvctl("limit", name, "1G", "--wait", "300")
        late = segment.Ack(
            revision=5,
            state="applied",
            effective_limit_bytes=1 << 20,
            mapped_bytes=0,
            over_bytes=0,
            reason="",
            acknowledged_ns=1,
            min_bytes=0,
            priority=0,
            requested_revision=4,
        )
        monkeypatch.setattr(segment, "request", lambda *_, **__: late)
        result = kvctl("limit", name, "2G", "--wait", "1")
        assert result.exit_code == 1
        assert "replaced by a later request" in result.stderr


def test_limit_for_a_dead_instance_fails(owner):
    owner.kill()
    result = kvctl("limit", owner.name, "1G", "--wait", "5")
    assert result.exit_code == 1
    assert "has ended" in result.stderr


# ------------------------------------------------------------------------------------ delete, gc


def test_delete_of_live_instance_needs_force(owner):
    refused = kvctl("delete", owner.name)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert owner.path.exists()
    forced = kvctl("delete", owner.name, "--force")
    assert forced.exit_code == 0
    assert not owner.path.exists()
    assert owner.end() == 0  # it lived, and ends well without its name


def test_delete_removes_dead_segment_and_fails_when_absent(owner):
    owner.kill()
    assert kvctl("delete", owner.name).exit_code == 0
    assert not owner.path.exists()
    again = kvctl("delete", owner.name)
    assert again.exit_code == 1
    assert owner.name in again.stderr


def test_delete_leaves_files_that_are_not_segments(name):
    (SHM / name).write_text("precious")
    assert kvctl("delete", name, "--force").exit_code == 1
    assert (SHM / name).read_text() == "precious"


def test_gc_lists_removed_segments(owner):
    owner.kill()
    assert f"Removed {owner.name}." in kvctl("gc").stdout
    assert owner.name not in kvctl("gc").stdout


def test_gc_as_json(owner, name):
    owner.kill()
    damaged = f"{name}_damaged"
    (SHM / damaged).write_bytes(b"KVELASTC" + (99).to_bytes(4, "little") + bytes(500))
    try:
        report = json.loads(kvctl("gc", "--json").stdout)
    finally:
        (SHM / damaged).unlink()
    assert set(report) == {"removed", "places", "ledgers", "left"}
    assert owner.name in report["removed"]
    (left,) = (entry for entry in report["left"] if entry["name"] == damaged)
    assert "version 99" in left["why"]


@pytest.mark.slow
def test_gc_frees_device_memory_of_dead_instances():
    """Killed instances leave their places in the ledger; the last one leaves the file, too."""
    device = {"KVELASTIC_HOST_MEMORY": "64M", "KVELASTIC_PAGE_PREALLOC_ENABLED": "false"}
    group = f"gc-{random.randrange(1 << 40):x}"
    device["KVELASTIC_LEDGER"] = group
    with Instance(**device) as survivor, Instance(**device) as victim:
        assert victim.alloc(8)
        victim.kill()
        said = kvctl("gc").stdout
        assert f"Removed {victim.name}.\n" in said
        assert re.search(rf"Freed \d+\.00 MiB of host, which {victim.name} had when it died", said)
        report = json.loads(kvctl("gc", "--json").stdout)
        assert victim.name not in [place["name"] for place in report["places"]]
        survivor.kill()
        report = json.loads(kvctl("gc", "--json").stdout)
        assert [path for path in report["ledgers"] if group in path]
        assert list(SHM.glob(f".kvelastic_ledger_{group}*")) == []


@pytest.mark.slow
def test_list_frees_device_memory_of_dead_instances():
    group = f"look-{random.randrange(1 << 40):x}"
    with Instance(KVELASTIC_HOST_MEMORY="64M", KVELASTIC_LEDGER=group) as victim:
        victim.kill()
        assert list(SHM.glob(f".kvelastic_ledger_{group}*"))
        assert kvctl("list").exit_code == 0
        assert list(SHM.glob(f".kvelastic_ledger_{group}*")) == []


# ----------------------------------------------------------------------------------------- watch


@pytest.mark.slow
def test_piped_watch_prints_one_table_per_interval(owner):
    result = subprocess.run(
        [KVCTL, "watch", "-n", "0.1", "--count", "3", owner.name],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.count("NAME") == 3
    assert result.stdout.count(owner.name) == 3
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_watch_json_prints_one_list_per_line(owner):
    result = subprocess.run(
        [KVCTL, "watch", "-n", "0.1", "--count", "2", "--json", owner.name],
        capture_output=True,
        text=True,
        check=True,
    )
    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [[entry["name"] for entry in look] for look in looks] == [[owner.name]] * 2
    assert set(looks[0][0]) == set(Row.__annotations__)


def test_watch_refuses_unknown_name_and_invalid_interval(owner):
    assert kvctl("watch", "no_such_instance").exit_code == 1
    assert kvctl("watch", "-n", "0").exit_code == 2
    assert kvctl("watch", "-n", "nan").exit_code == 2


@pytest.mark.parametrize("words", ["watch -n", "kvtop -n", "stats x --interval", "trim x --wait"])
@pytest.mark.parametrize("seconds", ["1e10", "inf", "nan", "-1"])
def test_times_out_of_range_are_refused(words, seconds):
    result = kvctl(*words.split(), seconds)
    assert result.exit_code == 2
    assert "to 31536000 seconds" in result.stderr


@pytest.mark.slow
def test_watch_exits_cleanly_on_sigint_or_closed_pipe(owner):
    watching = subprocess.Popen(
        [KVCTL, "watch", "-n", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout.readline().startswith("#")
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=DEADLINE_S)
    assert (watching.returncode, errors) == (0, "")
    closed = subprocess.Popen(
        [KVCTL, "watch", "-n", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    closed.stdout.readline()
    closed.stdout.close()
    assert closed.wait(timeout=DEADLINE_S) in (0, 1)
    assert "Traceback" not in closed.stderr.read()
    closed.stderr.close()


def on_terminal(arguments: list[str], columns: int, **environment: str) -> str:
    """What the command writes to a terminal of that width."""
    base = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
    return written_to_a_terminal(
        [KVCTL, *arguments],
        base | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment,
        columns=columns,
    )


@pytest.mark.slow
@pytest.mark.parametrize("columns", [30, 60, 80, 100, 130, 200])
@pytest.mark.parametrize("arguments", [["list"], ["watch", "-n", "0.1", "--count", "2"]])
def test_screens_fit_the_terminal(owner, columns, arguments):
    text = on_terminal(
        [*arguments, owner.name] if columns > 60 else arguments, columns, NO_COLOR="1"
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    lines = [line.rstrip() for line in plain.replace("\r", "\n").split("\n")]
    assert max(map(len, lines)) <= columns
    assert owner.name[:8] in plain


@pytest.mark.slow
def test_colours_can_be_turned_off(owner):
    coloured = on_terminal(["list"], 160)
    assert "\x1b[32m" in coloured or "\x1b[1;32m" in coloured
    assert "█" in coloured
    without = on_terminal(["list"], 160, NO_COLOR="1")
    assert "\x1b[32m" not in without
    ascii_only = on_terminal(["list"], 160, PYTHONIOENCODING="ascii")
    assert "#" in ascii_only
    assert ascii_only.isascii()


# ------------------------------------------------------------------------------ the rest of it


def test_version_and_help():
    assert kvctl("version").stdout.startswith("kvctl ")
    assert kvctl("--version").stdout == kvctl("version").stdout
    assert json.loads(kvctl("version", "--json").stdout)["version"] in kvctl("version").stdout
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    documented = "".join(page.read_text() for page in pages)
    context = click.Context(main)
    commands = {verb: main.get_command(context, verb) for verb in main.list_commands(context)}
    assert {"list", "limit", "set", "trim", "stats", "explain", "gc", "shell"} <= set(commands)
    for verb, command in commands.items():
        assert command is not None
        assert command.name == verb
        assert verb in kvctl("--help").stdout
        assert kvctl(verb, "--help").exit_code == 0
        assert f"kvctl {verb}" in documented
        options = [name for option in command.params for name in option.opts if name[:2] == "--"]
        options = [option for option in options if option != "--version"]
        assert [option for option in options if option not in documented] == []


@pytest.mark.slow
def test_kvctl_runs_as_a_module(owner):
    assert owner.name in run_python("-m", "kvelastic.cli", "list", "--json").stdout


@pytest.mark.slow
def test_names_are_completed(owner):
    result = subprocess.run(
        [KVCTL],
        env=os.environ
        | {
            "_KVCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": f"kvctl limit {owner.name[:8]}",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
    )
    assert f"plain,{owner.name}" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["list", "--json"], ["--version"], ["gc"], ["set", "no_such", "--min", "1"]]
)
def test_command_imports_no_heavy_modules(arguments):
    program = (
        "import sys; from kvelastic.cli.kvctl import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'rich', 'numpy', 'posix_ipc', 'importlib.metadata'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    assert run_python("-c", program).stderr.splitlines()[-1] == "[]"


def test_control_characters_in_names_are_replaced(name):
    hostile = "a\x1b[31mred\nnext\u202eline"
    assert printable(hostile) == "a\ufffd[31mred\ufffdnext\ufffdline"
    info = segment.SegmentInfo(f"x[bold]{hostile}", "unreadable", problem="damaged")
    assert "\x1b" not in plain_table([row_of(status_of(info))])
    drawn = drawn_table(info, 200)
    assert "x[bold]a" in drawn
    assert "\x1b[31m" not in drawn


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 160, 180, 200])
def test_names_of_wide_characters_are_not_folded(width):
    info = segment.SegmentInfo("日本語" * 7, "unreadable", problem="damaged")
    assert info.name in drawn_table(info, width)


def drawn_table(info, width: int) -> str:
    """The table of one instance on a terminal."""
    from rich.console import Console

    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(rich_table([row_of(status_of(info))], width))
    return captured.get()


@pytest.mark.parametrize(
    ("in_use", "cached", "parked", "limit", "cells"),
    [
        (0, 0, 0, 100, [0, 0, 0, 10]),
        (50, 20, 10, 100, [5, 2, 1, 2]),
        (1, 1, 1, 1000, [1, 1, 1, 7]),
        (100, 100, 0, 100, [5, 5, 0, 0]),
        (5, 0, 0, 0, [10, 0, 0, 0]),
        (0, 0, 0, 0, [0, 0, 0, 10]),
    ],
)
def test_bar_segments_add_up_to_its_width(in_use, cached, parked, limit, cells):
    entry = {
        "in_use_bytes": in_use,
        "cached_bytes": cached,
        "parked_bytes": parked,
        "limit_bytes": limit,
        "page_bytes": 1 if limit else 0,
    }
    assert bar_cells(entry, 10) == cells
    assert sum(cells) == 10
