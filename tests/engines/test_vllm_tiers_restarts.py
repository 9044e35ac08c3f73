"""vLLM with a disk tier, again and again: what a later start may find, and what it must not.

The tests are one story over one folder, in this order: each starts from what the one before left.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiered_server import Answer, TieredServer, check_found
from vllm_server import make_requests
from waiting import wait_until

pytestmark = pytest.mark.timeout(900)

PROGRAMS = Path(__file__).parents[1] / "programs"
ADAPTER = "adapted"
FIRST, SECOND, *_ = REQUESTS = [
    request._replace(max_tokens=16) for request in make_requests(4, seed=71, shortest=200)
]
NEVER_IDLE = {"KVELASTIC_TIER_IDLE_SECONDS": "-1"}
"""Only what shrinks the cache demotes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are changed under its path, and an adapter beside it."""
    folder = tmp_path_factory.mktemp("restarts") / "model"
    write_model(folder)
    write_adapter(folder, 1)
    return folder


def write_model(folder: Path, layers: int = 4) -> None:
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", folder, str(layers)], check=True)


def write_adapter(model: Path, seed: int) -> None:
    program = PROGRAMS / "tiny_adapter.py"
    subprocess.run([sys.executable, program, adapter_of(model), str(seed)], check=True)


def adapter_of(model: Path) -> Path:
    return model.with_name("adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "disk"


def serve_adapters(model: Path, log: Path, folder: Path) -> TieredServer:
    arguments = ["--enable-lora", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", f"{ADAPTER}={adapter_of(model)}"]
    runtime = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return TieredServer(model, log, folder, arguments, **NEVER_IDLE, **runtime)


@pytest.fixture(scope="module")
def first(model: Path, log_folder: Path, folder: Path) -> Iterator[TieredServer]:
    with serve_adapters(model, log_folder / "restarts_1.log", folder) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def answers() -> dict[str, list[int]]:
    """What the first server answered, for those that come after it."""
    return {}


def test_changed_adapter_finds_no_objects(first, model, answers) -> None:
    answers["base"] = first.ask(FIRST).tokens
    adapted = first.ask(FIRST, model=ADAPTER)
    assert adapted.own == adapted.loaded == 0
    assert adapted.tokens != answers["base"]
    put_to_sleep_and_wake(first)
    check_found(first.ask(FIRST, model=ADAPTER), FIRST, adapted.tokens)

    # The files change, and nobody says so: whose KV that is nobody knows.
    write_adapter(model, 2)
    assert first.ask(FIRST, model=ADAPTER) == Answer(adapted.tokens, 0, 0)
    loading = {"lora_name": ADAPTER, "lora_path": str(adapter_of(model)), "load_inplace": True}
    first.post("/v1/load_lora_adapter", **loading)
    changed = first.ask(FIRST, model=ADAPTER)
    assert changed.own == changed.loaded == 0
    assert changed.tokens not in (adapted.tokens, answers["base"])
    answers["adapted"] = changed.tokens


def put_to_sleep_and_wake(server: TieredServer, way: str = "abort") -> None:
    server.post(f"/sleep?level=1&mode={way}")
    server.post("/wake_up")


def test_requests_preempted_by_sleep_continue_from_tiers(first) -> None:
    """A sleep that keeps its requests preempts them: their blocks are copied, too."""
    request = SECOND._replace(max_tokens=500)
    expected = first.complete(request)
    tokens: list[list[int]] = []
    asking = threading.Thread(target=lambda: tokens.append(first.complete(request)))
    before = first.metrics()["generation_tokens_total"]
    loaded_before = first.status_file().blocks.loaded
    asking.start()
    wait_until(lambda: first.metrics()["generation_tokens_total"] >= before + 50)
    put_to_sleep_and_wake(first, "keep")
    asking.join()
    assert tokens == [expected]
    assert first.metrics()["num_preemptions_total"] > 0
    wait_until_loaded(first, loaded_before + len(request.prompt) // 32)


def wait_until_loaded(server: TieredServer, blocks: int) -> None:
    """The status file's figures are half a second old."""
    wait_until(
        lambda: server.status_file().blocks.loaded >= blocks, f"{blocks} blocks were not loaded"
    )


def test_shutdown_demotes_all_cached_blocks(first, model, log_folder, folder, answers) -> None:
    """Nothing but its end has demoted the adapter's blocks; each start finds what is its own."""
    assert first.ask(FIRST, model=ADAPTER).tokens == answers["adapted"]
    first.check_end()
    with serve_adapters(model, log_folder / "restarts_2.log", folder) as server:
        server.wait_until_ready()
        for name in ("base", "adapted"):
            answer = server.ask(FIRST, model={"base": "m", "adapted": ADAPTER}[name])
            assert answer.own == 0
            check_found(answer, FIRST, answers[name])
        server.kill()


def test_changed_weights_find_no_objects(model, log_folder, folder, answers) -> None:
    rewrite_weights(model, 1.5)
    with TieredServer(model, log_folder / "restarts_3.log", folder, **NEVER_IDLE) as server:
        server.wait_until_ready()
        answer = server.ask(FIRST)
        assert answer.own == answer.loaded == 0
        assert answer.tokens != answers["base"]
        answers["weights"] = answer.tokens
        put_to_sleep_and_wake(server)
        check_found(server.ask(FIRST), FIRST, answer.tokens)

        # In place: the records of the weights before are there, and not found.
        put_to_sleep_and_wake(server)
        rewrite_weights(model, 1.0 / 1.5)
        server.post("/collective_rpc", method="reload_weights")
        answer = server.ask(FIRST)
        assert answer.own == answer.loaded == 0
        assert answer.tokens == answers["base"]
        server.check_end()


def rewrite_weights(model: Path, factor: float) -> None:
    """Other weights in files of the same names and sizes."""
    code = (
        "import sys; from safetensors.torch import load_file, save_file;"
        "name, factor = sys.argv[1], float(sys.argv[2]); weights = load_file(name);"
        "save_file({key: value * factor if 'v_proj' in key else value"
        " for key, value in weights.items()}, name + '.new', metadata={'format': 'pt'})"
    )
    file = model / "model.safetensors"
    subprocess.run([sys.executable, "-c", code, file, str(factor)], check=True)
    shutil.move(f"{file}.new", file)


def test_two_workers_store_separate_objects_without_io_uring(
    model, log_folder, folder, answers
) -> None:
    forbidden = [sys.executable, str(PROGRAMS / "forbid_io_uring.py"), "425", "1"]
    with TieredServer(
        model,
        log_folder / "restarts_4.log",
        folder,
        ["--tensor-parallel-size", "2"],
        forbidden,
        VLLM_CPU_OMP_THREADS_BIND="0|1" if (psutil.cpu_count() or 1) > 1 else "0|0",
    ) as server:
        server.wait_until_ready()
        core = server.processes()["core"]
        assert "[io_uring]" not in "".join(map(str, Path(f"/proc/{core.pid}/fd").iterdir()))
        answer = server.ask(FIRST)
        assert answer.own == answer.loaded == 0, "records of one worker"
        put_to_sleep_and_wake(server)
        check_found(server.ask(FIRST), FIRST, answer.tokens)
        server.check_end()
