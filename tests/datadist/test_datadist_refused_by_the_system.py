"""What the system refuses: process_vm_readv for copies of callers' memory, and threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from forbidden_calls import PROCESS_VM_READV
from processes import PROGRAMS, run_python

from kvelastic import _vmm
from kvelastic.datadist import LLMDataDist, LLMRole
from kvelastic.shared import segment

PROGRAM = """
import ctypes, errno, mmap, os, sys
sys.path.insert(0, sys.argv[1])
from datadist_local import local_manager, read, second_options, write
from forbidden_calls import PROCESS_VM_READV, forbid
from kvelastic.datadist import CacheDesc, DataType, LLMException, LLMStatusCode, Placement

MIB = 1 << 20
manager, caches = local_manager(second_options(16 * MIB))
region = mmap.mmap(-1, 4 * MIB)
address = ctypes.addressof(ctypes.c_char.from_buffer(region))
desc = lambda placement: CacheDesc(1, [4, MIB], DataType.DT_INT8, placement)
callers = manager.register_blocks_cache(desc(Placement.HOST), [address])
ours = manager.allocate_blocks_cache(desc(Placement.DEVICE))

forbid(PROCESS_VM_READV, errno.EPERM)
assert ctypes.CDLL(None).process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1
content = os.urandom(MIB)
region[2 * MIB : 3 * MIB] = content
manager.swap_blocks(callers, ours, {2: 1})
assert read(ours, 0, MIB, MIB) == content
write(ours, 0, 0, content[::-1])
manager.swap_blocks(ours, callers, {0: 3})
assert region[3 * MIB :] == content[::-1]

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert libc.mprotect(address + MIB, MIB, 0) == 0
for source, target in ((callers, ours), (ours, callers)):
    try:
        manager.swap_blocks(source, target, {1: 1})
        raise AssertionError("memory that is not there was copied")
    except LLMException as error:
        assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID, error
manager.swap_blocks(callers, ours, {2: 2})  # and the process goes on
caches.check_integrity()
caches.close()
"""


@pytest.mark.skipif(PROCESS_VM_READV is None, reason="its number is not known here")
def test_unmapped_memory_is_detected_without_process_vm_readv() -> None:
    run_python("-c", PROGRAM, PROGRAMS)


def test_failed_init_leaves_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    options = {
        "ge.exec.deviceId": "0",
        "llm.EnableCacheManager": "1",
        "llm.MemPoolConfig": f'{{"memory_size": {16 << 20}}}',
    }
    before = [info.name for info in segment.list_segments()]
    datadist = LLMDataDist(LLMRole.MIX, 1)
    with monkeypatch.context() as patched:
        patched.setattr(_vmm, "MaintenanceThread", SimpleNamespace(start=refuse))
        with pytest.raises(RuntimeError, match="can't start"):
            datadist.init(options)
    assert [info.name for info in segment.list_segments()] == before
    datadist.init(options)
    datadist.finalize()
