"""kvctl stats: every figure of one instance, and rates from two looks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from called_kvctl import kvctl
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from segment_owner import MAPPED_BYTES, Owner

from kvelastic.cli.commands.stats import Look, Stats, stats_of
from kvelastic.instance.row import Row
from kvelastic.shared import segment

DEVICE = {"KVELASTIC_HOST_MEMORY": "64M", "KVELASTIC_PAGE_PREALLOC_ENABLED": "false"}


def stats(*arguments: str) -> Stats:
    return json.loads(kvctl("stats", *arguments, "--json").stdout)


def test_the_json_has_the_documented_keys(name):
    with Owner(name):
        told = stats(name)
    assert set(told) == set(Stats.__annotations__)
    documented = (Path(__file__).parents[2] / "docs" / "kvctl.md").read_text()
    _, _, section = documented.partition("## stats")
    section, _, _ = section.partition("\n## ")
    more = set(Stats.__annotations__) - set(Row.__annotations__)
    assert [key for key in more if f"`{key}`" not in section] == []


def test_statistics_match_the_instance():
    with Instance(**DEVICE) as one:
        one.alloc(2 * BLOCKS_PER_PAGE)
        told = stats(one.name)
        assert told["pages_mapped"] == 3  # the null block has begun the first
        assert told["mapped_bytes"] == 3 * PAGE_BYTES
        assert told["blocks_in_use"] == 2 * BLOCKS_PER_PAGE
        assert told["counters"]["allocs"] == 1
        counted = told["counters"]["pages_mapped"] - told["counters"]["pages_unmapped"]
        assert counted == told["pages_mapped"]
        sums = ("in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes")
        assert sum(told[key] for key in sums) == told["mapped_bytes"]
        assert told["rates"] is told["interval_s"] is None
        assert told["answered_s"] >= 0


def replace_next_sleep(monkeypatch: pytest.MonkeyPatch, event: Callable[[], object]) -> None:
    """Call `event` in place of this process's next sleep, which is the one between two looks."""
    sleep = time.sleep

    def call(_: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        event()

    monkeypatch.setattr(time, "sleep", call)


def test_rates_come_from_two_samples(monkeypatch):
    with Instance(**DEVICE) as one:
        replace_next_sleep(monkeypatch, lambda: [one.alloc(1) for _ in range(3)])
        told = stats(one.name, "--interval", "0.01")
        assert told["counters"]["allocs"] == 3
        assert told["rates"]["allocs"] == pytest.approx(3 / told["interval_s"], rel=0.01)
        assert told["rates"]["frees"] == 0
        replace_next_sleep(monkeypatch, lambda: [one.alloc(1) for _ in range(3)])
        text = kvctl("stats", one.name, "--interval", "0.01").stdout
        assert re.search(r"allocs +6 +\S+/s\n", text)


def test_rates_are_per_second(name):
    with Owner(name):
        info = segment.inspect(name)
    first = Look(replace(info, counters=info.counters | {"allocs": 10}), at_ns=1_000_000_000)
    second = Look(replace(info, counters=info.counters | {"allocs": 15}), at_ns=3_000_000_000)
    told = stats_of(second, before=first)
    assert told["interval_s"] == 2.0
    assert told["rates"]["allocs"] == 2.5
    # Another instance under the name counts from its own start.
    other = Look(replace(info, header=info.header | {"uuid": bytes(16)}), at_ns=0)
    assert stats_of(second, before=other)["rates"] is None


def test_text_shows_every_statistic(name):
    with Owner(name):
        text = kvctl("stats", name).stdout
    assert text.startswith(f"{name}\n")
    for topic in ("Limits", "Memory", "Pages", "Blocks", "Counters since its start"):
        assert f"\n{topic}\n" in text
    assert re.search(r"\n  mapped +96\.00 MiB\n", text)
    assert MAPPED_BYTES == 96 << 20
    assert re.search(r"\n  last request +none\n", text)
    assert re.search(r"\n  guarantee +0 B\n", text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("no_such_instance",), 1),
        ((), 2),
        (("NAME", "--interval", "0"), 2),
        (("NAME", "--interval", "soon"), 2),
        (("NAME", "NAME"), 2),
    ],
)
def test_wrong_usage(name, arguments, code):
    with Owner(name):
        result = kvctl("stats", *(name if word == "NAME" else word for word in arguments))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr


def test_unreadable_instance_exits_1(name):
    path = Path("/dev/shm") / name
    path.write_bytes(b"KVELASTC" + (99).to_bytes(4, "little") + bytes(500))
    try:
        result = kvctl("stats", name, "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "version 99" in result.stderr
    finally:
        path.unlink()


def test_instance_ending_between_samples_exits_1(name, monkeypatch):
    with Owner(name) as owner:
        replace_next_sleep(monkeypatch, owner.end)
        result = kvctl("stats", name, "--interval", "0.01")
        assert result.exit_code == 1
        assert name in result.stderr
