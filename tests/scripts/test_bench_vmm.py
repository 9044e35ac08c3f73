"""scripts/bench vmm: its arithmetic is what the simulator's trace shows, and labels are true."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import needs
import pytest

from benchmarks.vmm import (
    counted_calls,
    driver_kinds,
    grow_shrink,
    handover,
    kvcached_calls,
    layout_costs,
    part_process,
    prices,
    results,
)
from benchmarks.vmm.models import GIB, LLAMA_3_8B, MIB, QWEN3_4B, Model
from benchmarks.vmm.section import Section, median_ratio
from kvelastic.device import page_size

DELAYS = Path(__file__).parents[1] / "sim" / "delays.cpp"


@pytest.fixture(scope="module")
def counted():
    kind = driver_kinds.simulated()
    assert not kind.missing, kind.missing
    return part_process.run("counted_calls", kind, {}, **counted_calls.QUICK)


def test_cycle_makes_the_claimed_number_of_calls(counted):
    memory_calls = {way: calls["memory"] for way, calls in counted["cycles"].items()}
    assert memory_calls == {
        "bare": 3,
        "recycled": 3,
        "cold": 5,
        "parked": 0,
        "guarded": 6,
        "kvcached, contiguous": 8,
        "kvcached, per layer": 576,
    }
    assert counted["cycles"]["parked"]["other"] == 0


def test_trace_matches_the_arithmetic(counted):
    assert len(counted["costs"]) == 8
    for cost in counted["costs"]:
        assert cost["counted"] == {name: cost[name] for name in cost["counted"]}, cost["layout"]
        assert cost["pages"] > 1, "one page would hide a wrong factor"


@pytest.mark.parametrize(
    ("model", "handles", "given_back_calls"),
    [
        (LLAMA_3_8B, [64, 8, 8, 512], [320, 40, 64, 4096]),
        (QWEN3_4B, [57, 8, 8, 576], [285, 40, 64, 4608]),
    ],
    ids=["llama", "qwen"],
)
def test_handles_and_calls_per_gib(model, handles, given_back_calls):
    costs = layout_costs.all_costs(model, GIB)
    assert [cost.handles for cost in costs] == handles
    assert [cost.given_back_calls for cost in costs] == given_back_calls
    for cost in costs:
        assert cost.pages * cost.page_bytes >= GIB


def test_prices_match_the_simulator():
    names = {
        "create": "Create",
        "map": "Map",
        "set_access": "SetAccess",
        "unmap": "Unmap",
        "release": "Release",
    }
    text = DELAYS.read_text()
    for profile, priced in prices.PROFILES.items():
        told = re.search(rf'{{"{profile}",([^}}]*)}}', text)
        assert told is not None, profile
        for field, call in names.items():
            found = re.search(rf"cuMem{call}=([\d.]+)(?:\+([\d.]+))?", told[1])
            assert found is not None, call
            expected = prices.Price(float(found[1]), float(found[2] or 0))
            assert getattr(priced, field) == expected, (profile, call)


def test_readme_speedups_hold_at_bare_prices():
    contiguous = kvcached_calls.contiguous(LLAMA_3_8B)
    assert contiguous.page_id_bytes == 128 * MIB

    def times(profile: str, page_mib: int, *, recycled: bool) -> float:
        own = {"page_bytes": page_mib * MIB, "handles": 8 * GIB // (page_mib * MIB)}
        name = "kvelastic, recycled" if recycled else "kvelastic, given back"
        theirs = {"page_bytes": 128 * MIB, "handles": 64}
        return grow_shrink.priced_ms("kvcached, contiguous", theirs, profile) / (
            grow_shrink.priced_ms(name, own, profile)
        )

    assert times("a100", 128, recycled=True) == pytest.approx(5.44, abs=0.01)
    assert times("h100", 128, recycled=True) == pytest.approx(2.65, abs=0.01)
    assert times("gb10", 128, recycled=True) == pytest.approx(2.12, abs=0.01)
    assert times("a100", 128, recycled=False) == pytest.approx(1.23, abs=0.01)
    assert times("a100", 16, recycled=True) == pytest.approx(0.68, abs=0.01)


def test_handover_of_ten_gib_meets_its_time():
    bar_ms = handover.WHOLE_MS
    for profile, prices_ in prices.PROFILES.items():
        size_bytes = page_size.for_price(prices_.own_us(2 * MIB, given_back=True), 80 * GIB)
        data = {"page_bytes": size_bytes, "pages": 10 * GIB // size_bytes}
        whole_ms, first_ms = handover.priced_ms(data, profile)
        # The GB10 charges 12 us for each 2 MiB, whatever the page: 61 ms of 10 GiB.
        assert (whole_ms <= bar_ms) == (profile != "gb10"), profile
        assert first_ms <= handover.FIRST_MS, profile


def test_advantage_is_below_one_if_kvelastic_is_slower():
    data = {
        "contestants": {
            "ours": {"grow_us": [[4.0, 4.0], [4.0, 90.0]], "shrink_us": [[4.0, 4.0], [4.0, 4.0]]},
            "theirs": {"grow_us": [[1.0, 1.0], [1.0, 1.0]], "shrink_us": [[2.0, 3.0], [3.0, 3.0]]},
        }
    }
    assert grow_shrink.both_ms(data["contestants"]["ours"]) == pytest.approx(2 * 8 / 1000)
    assert grow_shrink.advantage(data, "ours", "theirs") == pytest.approx(4 / 8)
    assert median_ratio([2.0], [4.0]) == 0.5


@needs.torch
def test_every_layout_matches_a_dense_cache():
    import torch

    from benchmarks.vmm import cache_layouts, decode_attention
    from kvelastic import _vmm

    model = Model("tiny", layers=2, query_heads=4, kv_heads=2, head_dim=64)
    driver, blocks, requests = _vmm.HostDriver(), 300, 3
    dense = cache_layouts.dense(model, blocks, "cpu")
    wanted_blocks = torch.randperm(blocks)[: requests * 16].view(requests, 16)
    query = torch.randn((requests, model.query_heads, 1, model.head_dim), dtype=torch.bfloat16)
    wanted = decode_attention.step(model, dense, query, dense.ids[wanted_blocks])
    for cache in (
        cache_layouts.paged(model, driver, blocks, 2 * MIB),
        cache_layouts.paged(model, driver, blocks, 4 * MIB),
        cache_layouts.per_block(model, driver, blocks),
        cache_layouts.per_layer(model, driver, blocks),
    ):
        empty = decode_attention.step(model, cache, query, cache.ids[wanted_blocks])
        assert not torch.equal(empty, wanted), "nothing is in it yet"
        cache.fill_as(dense)
        answer = decode_attention.step(model, cache, query, cache.ids[wanted_blocks])
        assert torch.equal(answer, wanted), cache.name


def test_simulated_results_are_labelled(tmp_path):
    kind = driver_kinds.DriverKind(driver_kinds.SIMULATED, "no GPU")
    section = Section("Title", ("a", "b"), [("1", "2")], ["a note"])
    picture = results.write(
        kind, results.facts(kind), {}, [section], {"x": "no GPU"}, is_whole=True, folder=tmp_path
    )
    assert picture.name.endswith("-simulated.png")
    page = picture.with_suffix(".md").read_text()
    assert "no figure on this page was measured on a GPU" in page
    assert "| 1 | 2 |" in page
    assert "- x: no GPU" in page
    kept = json.loads(picture.with_suffix(".json").read_text())
    assert kept["simulated"] is True
    assert {"machine", "date", "driver", "commit"} <= set(kept)
    assert "kernel" in kept["machine"]


def test_missing_gpu_gives_the_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert "no nvidia-smi" in driver_kinds.cuda().missing
    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/false")
    assert "finds no GPU" in driver_kinds.cuda().missing


def test_result_files_name_the_gpu(monkeypatch):
    said = subprocess.CompletedProcess([], 0, "NVIDIA H200, 580.95.05\n", "")
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: said)
    kind = driver_kinds.cuda()
    assert (kind.missing, kind.what) == ("", "NVIDIA H200, driver 580.95.05")
    assert results.stem(kind).endswith("-cuda-nvidia-h200")


def test_failed_part_includes_its_output():
    kind = driver_kinds.host()
    with pytest.raises(part_process.PartFailedError, match="only the simulator has a trace"):
        part_process.run("counted_calls", kind, {}, **counted_calls.QUICK)
