"""The low-level calls: pages mapped by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvelastic import errors, vmm_ops
from kvelastic.pool.hand_mapped import HandMapped
from kvelastic.shared import ledger, segment

MIB = 1 << 20
PAGE = 2 * MIB


@pytest.fixture
def _ready() -> Iterator[None]:
    vmm_ops.init_kvelastic("cpu")
    yield
    vmm_ops.shutdown_kvelastic()


def test_calls_before_init_raise_runtime_error() -> None:
    with pytest.raises(RuntimeError, match=r"^kvelastic is not initialized"):
        vmm_ops.map_to_kv_tensors([0])
    assert not vmm_ops.kv_tensors_created()


@pytest.mark.usefixtures("_ready")
def test_pages_are_mapped_and_unmapped_in_every_layer() -> None:
    raw = vmm_ops.create_kv_tensors(5 * PAGE, 2, "cpu", 3)
    assert vmm_ops.kv_tensors_created()
    assert len(raw) == 3
    assert all(t.numel() == 6 * PAGE for t in raw), "rounded up: K and V have whole pages each"
    vmm_ops.map_to_kv_tensors([0, 2])
    for layer, tensor in enumerate(raw):
        for part in range(2):
            for page in (0, 2):
                start = part * 3 * PAGE + page * PAGE
                assert int(tensor[start : start + PAGE].abs().sum()) == 0, "new memory is zero"
                tensor[start : start + PAGE] = layer * 10 + part * 5 + page + 1
    vmm_ops.unmap_from_kv_tensors([0])
    with pytest.raises(errors.InvalidArgumentError, match="0 is not mapped"):
        vmm_ops.unmap_from_kv_tensors([2, 0])
    for layer, tensor in enumerate(raw):
        assert int(tensor[2 * PAGE]) == layer * 10 + 3
        assert int(tensor[5 * PAGE]) == layer * 10 + 8
    with pytest.raises(errors.InvalidArgumentError, match="2 is mapped already"):
        vmm_ops.map_to_kv_tensors([1, 2])
    vmm_ops.map_to_kv_tensors([1])
    vmm_ops.trim_kv_tensors()
    assert vmm_ops.page_bytes() == PAGE


@pytest.mark.usefixtures("_ready")
def test_block_ids_select_their_pages() -> None:
    vmm_ops.create_kv_tensors(8 * PAGE, 2, "cpu", 1, block_bytes=3 * MIB)
    vmm_ops.map_to_kv_tensors([], [1])  # bytes 3 MiB to 6 MiB: pages 1 and 2
    with pytest.raises(errors.InvalidArgumentError, match="1 is mapped already"):
        vmm_ops.map_to_kv_tensors([1])
    vmm_ops.unmap_from_kv_tensors([2], [1])
    vmm_ops.create_kv_tensors(PAGE, 2, "cpu", 1, group_id=7)
    with pytest.raises(errors.InvalidArgumentError, match="block_bytes"):
        vmm_ops.map_to_kv_tensors([], [1], group_id=7)


@pytest.mark.usefixtures("_ready")
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 2, "cpu", 1), "mem_size_per_layer=0"),
        ((PAGE, 3, "cpu", 1), "dtype_size=3"),
        ((PAGE, 2, "cpu", 0), "num_layers=0"),
        ((PAGE, 2, "cuda", 1), "cuda"),
    ],
)
def test_invalid_arguments_are_named(arguments: tuple[int, int, str, int], match: str) -> None:
    with pytest.raises(errors.KvelasticError, match=match):
        vmm_ops.create_kv_tensors(*arguments)


@pytest.mark.usefixtures("_ready")
def test_second_creation_of_a_group_is_rejected() -> None:
    vmm_ops.create_kv_tensors(PAGE, 2, "cpu", 1)
    with pytest.raises(errors.InvalidArgumentError, match="group 0"):
        vmm_ops.create_kv_tensors(PAGE, 2, "cpu", 1)


def test_interrupted_shutdown_closes_the_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    vmm_ops.init_kvelastic("cpu")
    for group in range(3):
        vmm_ops.create_kv_tensors(PAGE, 2, "cpu", 1, group_id=group)
    close = HandMapped.close
    interrupted: list[HandMapped] = []

    def interrupt_second(pages: HandMapped) -> None:
        interrupted.append(pages)
        if len(interrupted) == 2:
            raise KeyboardInterrupt
        close(pages)

    monkeypatch.setattr(HandMapped, "close", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        vmm_ops.shutdown_kvelastic()
    monkeypatch.undo()
    members = [member.name for info in ledger.list_ledgers() for member in info.members]
    assert members == [interrupted[1].segment.name]
    interrupted[1].close()


@pytest.mark.slow
def test_touching_an_unmapped_page_faults() -> None:
    program = (
        "from kvelastic import vmm_ops as v\n"
        "v.init_kvelastic('cpu')\n"
        "t = v.create_kv_tensors(16 << 20, 2, 'cpu', 1)[0]\n"
        "v.map_to_kv_tensors([0]); t[5] = 1; v.unmap_from_kv_tensors([0])\n"
        "print('still here', flush=True); t[5] = 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "still here\n"
    assert done.returncode == -11, "SIGSEGV"
    segment.reap()
    ledger.reap()
