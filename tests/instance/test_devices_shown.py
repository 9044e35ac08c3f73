"""An instance on two devices, as every surface shows it: what it has on each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_ledgers import Machine
from metrics_text import render
from native_pools import HUGE, LAYOUTS
from prometheus_client.parser import text_string_to_metric_families

from kvelastic import _vmm
from kvelastic.cli.commands.explain import choose_ledger
from kvelastic.cli.rendering.device_rows import device_rows
from kvelastic.controller.models import instance_memory
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import ledger, segment

PAGED = LAYOUTS["paged"]
BLOCKS = PAGED.blocks_per_page
KVCTL = str(Path(sys.executable).with_name("kvctl"))


@pytest.fixture
def shown() -> Iterator[tuple[Machine, str]]:
    """Three pages, two copies of each on b and one on a; a reserve on b."""
    machine = Machine({"a": 8, "b": 8})
    with segment.create(
        f"{machine.group}_shown", engine="test", devices=[("b", 2), ("a", 1)]
    ) as own:
        uuid = own.control_block.read_header()["uuid"]
        device_set = machine.join("bba", own.name, reserve_bytes={"b": HUGE}, uuid=uuid).device_set
        pool = _vmm.Pool(
            _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(PAGED, 4)),
            max_blocks=4 * BLOCKS,
            limit_bytes=99 * HUGE,
            capacity_bytes=99 * HUGE,
            preallocate=False,
            device_set=device_set,
        )
        maintenance = _vmm.MaintenanceThread.start(pool, own.control_block, idle_trim_s=-1.0)
        try:
            assert pool.alloc(3 * BLOCKS - 1)
            yield machine, own.name
        finally:
            maintenance.stop()
            pool.close(discard=True)
            machine.close()


def kvctl(*words: str) -> str:
    return subprocess.run([KVCTL, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_every_surface_shows_bytes_by_device(shown: tuple[Machine, str]) -> None:
    machine, name = shown
    wanted = [
        {
            "device": device,
            "copies": copies,
            "mapped_bytes": 3 * copies * HUGE,
            "granted_bytes": 3 * copies * HUGE,
            "reserved_bytes": reserved * HUGE,
            "ask_bytes": 0,
        }
        for device, copies, reserved in (("b", 2, 1), ("a", 1, 0))
    ]
    row = instance_memory.row(name)
    (listed,) = json.loads(kvctl("list", name, "--json"))
    stats = json.loads(kvctl("stats", name, "--json"))
    explained = json.loads(kvctl("explain", name, "--json"))
    for facts in (row, listed, stats, explained):
        assert facts["devices"] == wanted
        assert facts["mapped_bytes"] == facts["granted_bytes"] == 9 * HUGE
        assert facts["reserved_bytes"] == HUGE
        assert facts["capacity_bytes"] == 12 * HUGE, "as much as b has for two copies of three"
    assert "b: 12.00 MiB mapped, 12.00 MiB granted, 2.00 MiB reserved" in kvctl("stats", name)
    text = kvctl("explain", name)
    assert "on b and a" in text.splitlines()[0]
    assert "12.00 MiB on b, 6.00 MiB on a" in text
    segment.request(name, limit_bytes=6 * HUGE)
    assert [machine.members(device)[name].limit_bytes for device in "ab"] == [2 * HUGE, 4 * HUGE]


def test_metrics_have_a_series_for_each_device(shown: tuple[Machine, str]) -> None:
    _, name = shown
    text = render(segment.list_segments(), ledger.list_ledgers())
    found = {
        (sample.name.removeprefix("kvelastic_instance_"), sample.labels["device"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("name") == name
    }
    for metric in ("device_mapped_bytes", "granted_bytes"):
        assert (found[metric, "a"], found[metric, "b"]) == (3 * HUGE, 6 * HUGE)
    assert (found["reserved_bytes", "a"], found["reserved_bytes", "b"]) == (0, HUGE)
    assert found["mapped_bytes", "b"] == 9 * HUGE
    assert ("mapped_bytes", "a") not in found


def test_each_device_row_lists_its_share_of_instances(shown: tuple[Machine, str]) -> None:
    machine, name = shown
    rows = [row for row in instance_memory.rows_and_devices()[0] if row["name"] == name]
    mine = [one for one in ledger.list_ledgers() if one.group == machine.group]
    by_device = {row["uuid"]: row for row in device_rows([], rows, mine)}  # type: ignore[arg-type]
    assert {key: row["mapped_bytes"] for key, row in by_device.items()} == {
        "a": 3 * HUGE,
        "b": 6 * HUGE,
    }
    assert by_device["b"]["instances"][0]["reserved_bytes"] == HUGE


def test_explain_chooses_the_fuller_device(shown: tuple[Machine, str]) -> None:
    machine, name = shown
    uuid = segment.inspect(name).header["uuid"]

    def chosen() -> str:
        found = choose_ledger(
            [one for one in ledger.list_ledgers() if one.group == machine.group], uuid, "b"
        )
        assert found is not None
        return found.device

    assert chosen() == "b"  # the fuller one
    other = machine.join("a", "other")
    assert other.device_set.grant(5) == 5
    assert chosen() == "a"
