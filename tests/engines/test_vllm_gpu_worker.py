"""vLLM's own GPU worker, with both model runners, computing on the processor.

Its KV cache lies in memory of `CudaDriver` over the simulated driver. What runs is vLLM's: it looks
at the device's memory, profiles, makes its cache, warms up, generates, sleeps and wakes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from simulated_machine import SimulatedMachine
from vllm_server import engine_environment, make_requests

pytestmark = pytest.mark.timeout(1500)

PROGRAMS = Path(__file__).parents[1] / "programs"
DEVICE_BYTES = 1 << 30
BLOCK_BYTES = (2 << 20) // 32
PLAN_MARGIN_BYTES = 150 << 20
"""What vLLM keeps back in a start-up plan."""
TORCH_PEAK_BYTES = 16 << 20
BESIDE = {
    "V1": {"TEST_STARTING_BYTES": str(64 << 20)},
    "V2": {"TEST_NEIGHBOUR_BYTES": str(768 << 20)},
}
"""Another engine that starts at the same time; a neighbour with three quarters of the device."""


def run(program: str, *arguments: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / program, *arguments],
        env=engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=needs.triton)])
def gpu_run(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one engine did, from its start to its end; with stock vLLM's tokens beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    wanted, tokens, results = folder / "requests", folder / "tokens", folder / "results"
    # Triton's interpreter takes a hundred times as long: fewer requests, but of unlike lengths.
    count, longest = (16, 600) if request.param == "V1" else (5, 200)
    asked = make_requests(count, 4, shortest=10, longest=longest)
    if request.param == "V2":
        asked = [one._replace(max_tokens=min(one.max_tokens, 20)) for one in asked]
    wanted.write_text(json.dumps(asked))
    run("inprocess_engine.py", tiny_model, wanted, tokens)
    with SimulatedMachine(folder, memory_bytes=DEVICE_BYTES) as machine:
        environment = {
            **machine.readable_environment(),
            "PYTHONPATH": str(PROGRAMS),
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": f"kvelastic_gpu_worker_{os.getpid()}",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_SANITY_CHECK": "true",
            **BESIDE[request.param],
        }
        if request.param == "V2":
            environment |= {"TEST_TRITON": str(needs.TRITON), "VLLM_USE_V2_MODEL_RUNNER": "1"}
        run("gpu_engine.py", tiny_model, wanted, results, **environment)
        found: dict[str, Any] = json.loads(results.read_text())
        found["left_bytes"] = machine.used_bytes()
    found["expected"] = json.loads(tokens.read_text())
    found["asked_for"] = request.param
    return found


def test_requested_model_runner_is_used(gpu_run: dict[str, Any]) -> None:
    runner = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}
    assert gpu_run["runner"] == runner[gpu_run["asked_for"]]


def test_tokens_match_stock(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["tokens"] == gpu_run["expected"]
    assert gpu_run["tokens_under_limits"] == gpu_run["expected"]
    assert gpu_run["tokens_after_wake"] == gpu_run["expected"]
    assert gpu_run["used_bytes"] > 0


def test_applied_limit_bounds_device_usage(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["limits_applied"] > 0
    assert gpu_run["over_the_limit"] == []


def test_neighbours_during_profiling_do_not_reduce_the_range(gpu_run: dict[str, Any]) -> None:
    """A neighbour has three quarters of the device and frees them; vLLM was told to use a half.

    Or another engine loads the weights that it had reserved before this one looked first.
    """
    happened = {"V1": "another engine loads", "V2": "neighbour frees"}
    assert gpu_run["events"][0] == happened[gpu_run["asked_for"]]
    capacity_bytes = DEVICE_BYTES // 2 - TORCH_PEAK_BYTES
    assert gpu_run["num_blocks"] * BLOCK_BYTES == pytest.approx(capacity_bytes, rel=0.02)


def test_arena_is_outside_the_pools_of_vllms_allocator(gpu_run: dict[str, Any]) -> None:
    assert "arena, in the pools []" in gpu_run["events"]


def test_sleep_unmaps_all_and_wake_maps_null_block(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["asleep_bytes"] == 0
    asleep = gpu_run["events"].index("weights sleep at level 1")
    assert gpu_run["events"][asleep + 1] == "weights wake, 2 MiB of the device are used"


def test_block_tables_have_no_stale_ids(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["rows"] > 0
    assert gpu_run["stale_ids"] == 0


def test_unmap_waits_for_kernels_on_the_worker_stream(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["under_the_kernel"] != "applied"
    assert gpu_run["unmapped_under_the_kernel"] == 0
    assert gpu_run["after_the_kernel"] == "applied"
    assert gpu_run["used_after_the_kernel"] == 0
    assert gpu_run["context_error"] == 0


def test_device_memory_is_released_at_exit(gpu_run: dict[str, Any]) -> None:
    assert gpu_run["left_bytes"] == 0


def test_startup_plan_applies_beside_a_neighbour(tiny_model: Path, tmp_path: Path) -> None:
    """vLLM uses a plan only if as much memory is free as at the start that recorded it."""
    nothing, results, blocks = tmp_path / "requests", tmp_path / "results", []
    nothing.write_text("[]")
    with SimulatedMachine(tmp_path, memory_bytes=DEVICE_BYTES) as machine:
        for beside in ({}, BESIDE["V2"]):
            environment = {
                **machine.readable_environment(),
                "PYTHONPATH": str(PROGRAMS),
                "ENABLE_KVELASTIC": "true",
                "KVELASTIC_IPC_NAME": f"kvelastic_plan_{os.getpid()}",
                "VLLM_ENABLE_STARTUP_PLAN": "1",
                "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
                **beside,
            }
            run("gpu_engine.py", tiny_model, nothing, results, **environment)
            blocks.append(json.loads(results.read_text())["num_blocks"])
    alone, planned = blocks
    assert (alone - planned) * BLOCK_BYTES == pytest.approx(PLAN_MARGIN_BYTES, rel=0.1)
