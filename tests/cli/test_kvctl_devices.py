"""`kvctl devices` as a process of its own: with no NVML, with a strict one, and with instances."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, write_packages
from ledger_instance import Instance
from segment_owner import CAPACITY_BYTES, MAPPED_BYTES, Owner
from terminal import written_to_a_terminal

from kvelastic.cli.commands.devices import plain_tables
from kvelastic.cli.rendering.device_rows import DeviceRow, InstanceRow, ProcessRow, device_rows
from kvelastic.device.machine import DeviceFacts, ProcessMemory
from kvelastic.instance.row import DeviceUseRow, Row
from kvelastic.instance.status import uuid_text
from kvelastic.shared import segment
from kvelastic.shared.ledger_facts import LedgerInfo, Member

KVCTL = str(Path(sys.executable).with_name("kvctl"))
WHOLE_GPU = "GPU-11111111-1111-1111-1111-111111111111"


@pytest.fixture
def gpus(tmp_path) -> dict[str, str]:
    """An environment in which NVML has a whole GPU, a split one, an integrated and a lost one."""
    write_packages(tmp_path)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def no_nvml(tmp_path) -> dict[str, str]:
    """An environment in which no package reaches NVML, whatever is installed."""
    write_packages(tmp_path)
    (tmp_path / "pynvml.py").write_text("raise ImportError\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def kvctl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [KVCTL, "devices", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def rows(environment: dict[str, str]) -> list[DeviceRow]:
    found: list[DeviceRow] = json.loads(kvctl(environment, "--json").stdout)
    return found


def segment_row(name: str, device: str | None, **values: Any) -> Row:
    blank: dict[str, Any] = dict.fromkeys(Row.__annotations__)
    told = {"name": name, "device": device, "state": "applied", "mapped_bytes": 1, **values}
    use = dict.fromkeys(DeviceUseRow.__annotations__) | {
        "device": device,
        "copies": 1,
        "mapped_bytes": told["mapped_bytes"] or 0,
        "granted_bytes": told.get("granted_bytes"),
    }
    told["devices"] = None if device is None else [use]
    return Row(**(blank | told))  # type: ignore[typeddict-item]


# ------------------------------------------------------------------------------------------- json


@pytest.mark.slow
def test_json_without_nvml_lists_the_host_only(owner, no_nvml):
    result = kvctl(no_nvml, "--json")
    (host,) = json.loads(result.stdout)
    assert set(host) == set(DeviceRow.__annotations__)
    assert (host["kind"], host["name"], host["uuid"], host["processes"]) == (
        "host",
        "host",
        None,
        None,
    )
    assert host["total_bytes"] == host["used_bytes"] + host["free_bytes"]
    assert host["problem"] == ""
    (instance,) = [each for each in host["instances"] if each["name"] == owner.name]
    assert instance == {
        "name": owner.name,
        "pid": owner.pid,
        "engine": "test",
        "model": "none",
        "state": "applied",
        "mapped_bytes": MAPPED_BYTES,
        "reserved_bytes": None,
        "limit_bytes": CAPACITY_BYTES,
    }
    assert host["mapped_bytes"] == sum(each["mapped_bytes"] for each in host["instances"])
    assert result.stderr.startswith("GPUs: no package is installed")
    assert "pip install 'kvelastic[cuda]'" in result.stderr


def test_every_key_is_documented():
    documented = (Path(__file__).parents[2] / "docs" / "kvctl.md").read_text()
    section = documented.split("\n## devices\n")[1].split("\n## ")[0]
    for kind in (DeviceRow, InstanceRow, ProcessRow):
        assert [key for key in kind.__annotations__ if f"`{key}`" not in section] == []


@pytest.mark.slow
def test_host_capacity_comes_from_the_environment_variable(no_nvml):
    (host,) = rows(no_nvml | {"KVELASTIC_HOST_MEMORY": "3G"})
    assert host["capacity_bytes"] == 3 * GIB
    (host,) = rows(no_nvml | {"KVELASTIC_HOST_MEMORY": "banana"})
    assert host["capacity_bytes"] is None
    assert "banana" in host["problem"]


@pytest.mark.slow
def test_instances_capacity_overrides_the_shell_environment(no_nvml):
    """Also of an instance that is in no ledger, as the owner of this test is."""
    environ = no_nvml | {"KVELASTIC_HOST_MEMORY": "3G"}
    with Instance(KVELASTIC_HOST_MEMORY="400M", KVELASTIC_LEDGER=f"devices_{os.getpid()}"):
        (host,) = rows(environ)
        assert host["capacity_bytes"] == 400 << 20
    with Owner("-"):
        (host,) = rows(environ)
        assert host["capacity_bytes"] == CAPACITY_BYTES


@pytest.mark.slow
def test_json_with_gpus(gpus, name):
    mine = segment.create(name, engine="test", model="none", device=WHOLE_GPU)
    try:
        mine.control_block.publish_usage(
            capacity_bytes=4 * GIB, mapped_bytes=GIB, page_bytes=2 << 20
        )
        result = kvctl(gpus, "--json")
    finally:
        mine.close()
    assert result.stderr == ""
    found = json.loads(result.stdout)
    kinds = [(row["kind"], row["parent_index"], row["index"]) for row in found]
    assert kinds == [
        ("host", None, None),
        ("gpu", None, 0),
        ("gpu", None, 1),
        ("mig", 1, 1),
        ("mig", 1, 3),
        ("gpu", None, 2),
        ("gpu", None, 3),
    ]
    whole = found[1]
    assert whole["uuid"] == WHOLE_GPU
    assert [(each["name"], each["mapped_bytes"]) for each in whole["instances"]] == [(name, GIB)]
    assert whole["mapped_bytes"] == GIB
    assert [(each["pid"], each["used_bytes"]) for each in whole["processes"]] == [
        (4_000_001, 5 * GIB),
        (4_000_002, None),
    ]
    assert [bool(row["problem"]) for row in found] == [False, False, True, False, False, True, True]
    assert all(set(row) == set(DeviceRow.__annotations__) for row in found)


@pytest.mark.slow
def test_devices_command_removes_no_segment(owner, no_nvml):
    owner.kill()
    (host,) = rows(no_nvml)
    assert owner.name not in [each["name"] for each in host["instances"]]
    assert owner.path.exists()


# ------------------------------------------------------------------------------------- the join


def test_instances_are_found_on_their_device():
    digits = "ABCDEF00-1111-2222-3333-444444444444"
    devices = [
        DeviceFacts("host", "host"),
        DeviceFacts("gpu", "whole", 0, WHOLE_GPU),
        DeviceFacts("mig", "part", 0, f"MIG-{digits}"),
        DeviceFacts("gpu", None, 2, problem="lost"),
    ]
    segments = [
        segment_row("a", "host"),
        segment_row("b", WHOLE_GPU, mapped_bytes=10),
        segment_row("c", WHOLE_GPU, mapped_bytes=None),
        segment_row("d", f"GPU-{digits.lower()}"),
        segment_row("dead", WHOLE_GPU, state="dead"),
        segment_row("unreadable", None, state="unreadable", mapped_bytes=None),
        segment_row("e", "GPU-elsewhere", mapped_bytes=3),
        segment_row("f", "GPU-elsewhere", mapped_bytes=4),
    ]
    found = device_rows(devices, segments)
    assert [[each["name"] for each in row["instances"]] for row in found] == [
        ["a"],
        ["b", "c"],
        ["d"],
        [],
        ["e", "f"],
    ]
    assert [row["mapped_bytes"] for row in found] == [1, 10, 1, 0, 7]
    unknown = found[-1]
    assert (unknown["kind"], unknown["uuid"], unknown["index"]) == (
        "unknown",
        "GPU-elsewhere",
        None,
    )
    assert unknown["problem"]


def place(digit: str, **values: Any) -> Member:
    blank: dict[str, Any] = {field.name: 0 for field in fields(Member)}
    told = {"name": digit, "uuid": bytes.fromhex(digit * 32), "status": "alive", "asleep": False}
    return Member(**(blank | told | values))


def test_reserved_bytes_are_summed_per_device():
    """One instance in the ledgers of two devices, and one that sleeps."""
    a, asleep = segment_row("a", "host", uuid=uuid_text(b"\x11" * 16)), segment_row("z", WHOLE_GPU)
    on_host = place("1", reserve_bytes=5, pledged_bytes=5)
    on_gpu = place("1", reserve_bytes=7, pledged_bytes=7)
    sleeping = place("2", reserve_bytes=9, asleep=True)
    ledgers = [
        LedgerInfo("host", "readable", group="default", members=(on_host,)),
        LedgerInfo("host", "readable", group="other", members=(place("3", pledged_bytes=1),)),
        LedgerInfo(WHOLE_GPU, "readable", members=(on_gpu, sleeping)),
        LedgerInfo("default_GPU-9", "foreign"),
    ]
    asleep["uuid"] = uuid_text(b"\x22" * 16)
    devices = [DeviceFacts("host", "host"), DeviceFacts("gpu", "whole", 0, WHOLE_GPU)]
    host, gpu = device_rows(devices, [a, asleep, segment_row("b", "host")], ledgers)
    assert (host["reserved_bytes"], gpu["reserved_bytes"]) == (6, 7)
    assert [each["reserved_bytes"] for each in host["instances"]] == [5, None]
    assert [each["reserved_bytes"] for each in gpu["instances"]] == [9]  # when it wakes
    (alone,) = device_rows(devices[1:], [])
    assert alone["reserved_bytes"] is None


# ----------------------------------------------------------------------------------------- tables


def test_plain_tables():
    facts = [
        DeviceFacts("gpu", "fake", 0, WHOLE_GPU, processes=(ProcessMemory(7, None, "x\x1b[31m"),)),
        DeviceFacts("mig", None, 1, "MIG-a", parent=WHOLE_GPU, parent_index=0, problem="is bad"),
    ]
    text = plain_tables(device_rows(facts, [segment_row("big", WHOLE_GPU, mapped_bytes=GIB)]))
    devices, holders, problems = text.split("\n\n")
    assert devices.splitlines()[0].split() == [
        "DEVICE", "TOTAL", "USED", "FREE", "CAPACITY", "MAPPED", "RESERVED", "DRIVER", "UUID",
        "NAME",
    ]  # fmt: skip
    assert devices.splitlines()[1].split()[:6] == ["gpu:0", "-", "-", "-", "-", "1.00"]
    assert [line.split()[:3] for line in holders.splitlines()] == [
        ["DEVICE", "HOLDER", "PID"],
        ["gpu:0", "instance", "-"],
        ["gpu:0", "process", "7"],
    ]
    assert holders.splitlines()[2].endswith("-  x\ufffd[31m")
    assert problems == "mig:0:1: is bad."


def test_piped_output_is_plain_text(gpus):
    result = kvctl(gpus)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("DEVICE")
    labels = [line.split()[0] for line in lines[1:8]]
    assert labels == ["host", "gpu:0", "gpu:1", "mig:1:1", "mig:1:3", "gpu:2", "gpu:3"]
    assert lines[-1].startswith("gpu:3: the GPU is lost")
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def on_terminal(environment: dict[str, str], columns: int, **more: str) -> str:
    """What the command writes to a terminal of that width."""
    base = {key: value for key, value in environment.items() if key not in {"COLUMNS", "NO_COLOR"}}
    return written_to_a_terminal(
        [KVCTL, "devices"],
        base | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | more,
        columns=columns,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.parametrize("columns", [30, 60, 80, 130, 200])
def test_screens_fit_the_terminal(gpus, owner, columns):
    text = on_terminal(gpus, columns, NO_COLOR="1")
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in text.split("\n")]
    assert max(map(len, lines)) <= columns
    assert "mig:1:3" in text
    assert "Free" in text
    assert ("Capacity" in text) == (columns >= 200)
    assert owner.name[:8] in text


@pytest.mark.slow
def test_colours_can_be_turned_off(gpus):
    coloured = on_terminal(gpus, 160)
    assert "\x1b[33m" in coloured
    assert "\x1b[31mGB10" not in coloured  # what a GPU calls itself steers no terminal
    without = on_terminal(gpus, 160, NO_COLOR="1")
    assert "\x1b[33m" not in without
    assert "GB10[bold]" in without
    assert on_terminal(gpus, 160, PYTHONIOENCODING="ascii", NO_COLOR="1").isascii()


@pytest.mark.slow
def test_help_works_without_importing_device_modules():
    result = subprocess.run([KVCTL, "devices", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "--json" in result.stdout
    program = (
        "import sys, kvelastic.cli.kvctl\n"
        "late = {'kvelastic.device.machine', 'kvelastic.device.nvml',"
        " 'kvelastic.shared.segment', 'rich'}\n"
        "print(sorted(late & set(sys.modules)))"
    )
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert imported.stdout == "[]\n"
