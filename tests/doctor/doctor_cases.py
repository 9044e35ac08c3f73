"""Machines for the doctor to judge, and what it must say of them: every check in each state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec.structs import fields

from kvelastic.device.tested_gpus import ROWS, Row
from kvelastic.doctor.facts import (
    ConfigFacts,
    Facts,
    Gpu,
    GpuFacts,
    LegacyName,
    LimitFacts,
    MemoryFacts,
    PackageFacts,
    ProbeFact,
    ShmFacts,
    StartupFacts,
    SystemFacts,
    TierFolderFact,
)
from kvelastic.instance.status import InstanceStatus
from kvelastic.shared.ledger_facts import LedgerInfo
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.shared.tier_status import BlockCounts, TiersStatus, TierStatus

GIB = 1 << 30
MIB = 1 << 20

GPU = Gpu(0, "H200", "GPU-1", 2 * MIB, 140 * GIB, 139 * GIB)
NO_LIBRARY = "libcuda.so.1: cannot open shared object file"
PACKAGES = PackageFacts(
    python=(3, 11, 7),
    versions=(("vllm", "0.32.0+cpu"), ("torch", "2.13.0"), ("nvidia-ml-py", "13.580")),
    plugins=(("vllm", ("kvelastic", "other")),),
)
GOOD = Facts(
    gpus=GpuFacts(kernel_module="580.82", cuda_version=13000, count=1, gpus=(GPU,)),
    shm=ShmFacts(size_bytes=8 * GIB, free_bytes=8 * GIB, needed_bytes=266240),
    memory=MemoryFacts(40 * GIB, thp_enabled="madvise", thp_shmem="never"),
    limits=LimitFacts(65530, 20000, None, 0, 16 * GIB, GIB),
    system=SystemFacts(kernel="6.18.1"),
    config=ConfigFacts(enabled=True),
    packages=PACKAGES,
    gpus_that_ran=(Row("H200", "580.82", "FlashAttention 3", "seen"),),
)


def with_gpus(**changes: Any) -> Facts:
    return replace(GOOD, gpus=replace(GOOD.gpus, **changes))


def with_config(facts: Facts = GOOD, **changes: Any) -> Facts:
    return replace(facts, config=replace(facts.config, **changes))


def allowing(plugins: str, **changes: Any) -> Facts:
    return with_config(allowed_plugins=(("vllm", plugins),), **changes)


def probed(**found: Any) -> Facts:
    """After `kvctl doctor --probe`, of vLLM."""
    return replace(GOOD, probes=(ProbeFact("vllm", **found),))


def with_packages(**changes: Any) -> Facts:
    return replace(GOOD, packages=replace(PACKAGES, **changes))


def on_host(**changes: Any) -> Facts:
    """The same machine without a GPU, so that the host is the device."""
    return replace(GOOD, gpus=GpuFacts(library_error=NO_LIBRARY), **changes)


def without(name: str) -> Facts:
    return with_packages(versions=tuple(v for v in PACKAGES.versions if v[0] != name))


def adding(name: str, version: str) -> Facts:
    others = tuple(v for v in PACKAGES.versions if v[0] != name)
    return with_packages(versions=(*others, (name, version)))


def only_transformers(version: str = "5.19.0", **startup: Any) -> Facts:
    """An environment with no other engine."""
    packages = with_packages(versions=(("transformers", version),)).packages
    return replace(GOOD, packages=packages, startup=StartupFacts(**startup))


def beside_vllm(facts: Facts) -> Facts:
    versions = (*facts.packages.versions, ("vllm", "0.32.0"))
    return replace(facts, packages=replace(facts.packages, versions=versions))


LOADED: dict[str, Any] = {"armed": ("transformers.generation.continuous_batching",)}


def segment(status: str, pid: int = 1, **changes: Any) -> Facts:
    return replace(GOOD, segments=(SegmentInfo("s1", status, header={"pid": pid}, **changes),))


CALM = InstanceStatus("s1", "alive", "applied", capacity_bytes=GIB, limit_bytes=GIB, page_bytes=MIB)
WAITS = replace(CALM, requests_waiting=3, first_needs_bytes=MIB)
STUCK = replace(WAITS, first_needs_bytes=2 * GIB)


NONE: Any = 0


def instance(status: InstanceStatus, **tier: Any) -> Facts:
    """With a disk tier."""
    counts = dict.fromkeys([field.name for field in fields(TierStatus)][2:], NONE)
    blocks = BlockCounts(*[0] * len(fields(BlockCounts)))
    disk = TierStatus("disk", "disk", **(counts | {"is_current": True, "problem": ""} | tier))
    shown = TiersStatus(0, 0, "write_back", blocks, (disk,))
    return replace(GOOD, instances=(replace(status, shown_tiers=shown),))


def ledger(status: str) -> Facts:
    return replace(GOOD, ledgers=(LedgerInfo("host", status, problem="belongs to user 7"),))


def shm(**changes: Any) -> Facts:
    return replace(GOOD, shm=replace(GOOD.shm, **changes))


def memory(**changes: Any) -> MemoryFacts:
    return replace(GOOD.memory, **changes)


def limits(**changes: Any) -> LimitFacts:
    return replace(GOOD.limits, **changes)


def kernel(release: str, **changes: Any) -> SystemFacts:
    return replace(GOOD.system, kernel=release, **changes)


BROKEN_GPU = replace(GPU, ordinal=1, error="cuda:1 has no virtual memory management")
HOST = with_config(device="host")

TABLE: list[tuple[str, str, Facts, str]] = [
    ("gpu.driver", "ok", GOOD, "NVIDIA driver 580.82 (CUDA 13.0), 1 GPU"),
    ("gpu.driver", "ok", with_gpus(cuda_version=11030), "CUDA 11.3"),
    ("gpu.driver", "ok", with_gpus(count=2, gpus=(GPU, replace(GPU, ordinal=1))), "2 GPUs"),
    ("gpu.driver", "note", on_host(), "no NVIDIA driver"),
    ("gpu.driver", "problem", with_config(on_host(), device="cuda:1"), "KVELASTIC_DEVICE=cuda:1"),
    (
        "gpu.driver",
        "problem",
        with_gpus(library_error=NO_LIBRARY, has_device_files=True, gpus=()),
        NO_LIBRARY,
    ),
    (
        "gpu.driver",
        "note",
        with_config(with_gpus(library_error=NO_LIBRARY, gpus=()), device="host"),
        "kernel module 580.82",
    ),
    ("gpu.driver", "problem", with_gpus(cuda_version=11020), "too old: it supports CUDA 11.2"),
    ("gpu.driver", "note", with_config(with_gpus(cuda_version=10010), device="host"), "CUDA 10.1"),
    ("gpu.driver", "problem", with_gpus(child_end="died of SIGSEGV", gpus=()), "died of SIGSEGV"),
    (
        "gpu.driver",
        "warning",
        with_gpus(start_error="cuInit: CUDA_ERROR_NO_DEVICE (100)", count=0, gpus=()),
        "no GPU is visible",
    ),
    (
        "gpu.driver",
        "note",
        with_gpus(count=0, gpus=(), visible_devices=""),
        "CUDA_VISIBLE_DEVICES=''",
    ),
    (
        "gpu.driver",
        "problem",
        with_config(with_gpus(count=0, gpus=(), visible_devices="-1"), device="cuda"),
        "CUDA_VISIBLE_DEVICES='-1'",
    ),
    (
        "gpu.driver",
        "problem",
        with_gpus(start_error="cuInit: CUDA_ERROR_UNKNOWN (999)", count=0, gpus=()),
        "does not start: cuInit: CUDA_ERROR_UNKNOWN (999)",
    ),
    ("gpu.driver", "note", with_config(with_gpus(count=0, gpus=()), device="host"), "no GPU"),
    ("gpu.vmm", "ok", GOOD, "cuda:0 H200 (GPU-1): pages of 2.00 MiB, 139.00 GiB of 140.00 GiB"),
    ("gpu.vmm", "note", with_gpus(gpus=(replace(GPU, granularity_bytes=4 * MIB),)), "4.00 MiB"),
    ("gpu.vmm", "problem", with_gpus(gpus=(BROKEN_GPU,)), "no virtual memory management"),
    ("gpu.vmm", "problem", with_gpus(gpus=(replace(GPU, error="OUT_OF_MEMORY"),)), "OUT_OF_MEM"),
    ("gpu.vmm", "problem", with_gpus(gpus=(replace(GPU, error="it is too old"),)), "too old"),
    ("gpu.vmm", "problem", with_gpus(gpus=(replace(GPU, error="odd"),)), "odd"),
    (
        "gpu.vmm",
        "warning",
        with_config(with_gpus(gpus=(GPU, BROKEN_GPU)), device="cuda:0"),
        "cuda:1 H200",
    ),
    ("gpu.device", "ok", GOOD, "auto selects cuda:0"),
    ("gpu.device", "ok", with_gpus(gpus=(BROKEN_GPU,)), "auto selects host memory"),
    ("gpu.device", "ok", HOST, "KVELASTIC_DEVICE=host"),
    ("gpu.device", "ok", with_config(device="cuda"), "KVELASTIC_DEVICE=cuda"),
    ("gpu.device", "problem", with_config(device="cuda:7"), "cuda:7 is not usable; usable"),
    (
        "gpu.device",
        "problem",
        with_config(with_gpus(gpus=(BROKEN_GPU,)), device="cuda:1"),
        "cuda:1 is not usable, and no other GPU is",
    ),
    ("gpu.seen", "ok", GOOD, "cuda:0 H200: GPUs of this model have run kvelastic"),
    ("gpu.seen", "note", replace(GOOD, gpus_that_ran=ROWS), "Tested: NVIDIA H100"),
    ("gpu.packages", "ok", GOOD, "NVML works; nvidia-ml-py 13.580"),
    ("gpu.packages", "ok", on_host(), "NVML is not needed"),
    ("gpu.packages", "note", without("nvidia-ml-py"), "no Python package"),
    ("gpu.packages", "note", with_gpus(nvml_error="no such file"), "no such file"),
    # ------------------------------------------------------------------------------------- host
    ("host.kernel", "ok", on_host(), "Linux 6.18.1"),
    ("host.kernel", "ok", on_host(system=kernel("6.1.0-rpi7")), "6.1.0"),
    ("host.kernel", "warning", on_host(system=kernel("5.14.0-427.el9")), "MADV_COLLAPSE"),
    ("host.kernel", "note", replace(GOOD, system=kernel("5.15.0")), "MADV_COLLAPSE"),
    (
        "host.kernel",
        "problem",
        on_host(system=kernel("4.4.0"), memory=memory(page_error="EINVAL")),
        "MADV_POPULATE_WRITE",
    ),
    ("host.kernel", "note", on_host(system=kernel("5.4.0")), "but host memory can be mapped"),
    ("host.kernel", "note", on_host(system=kernel("odd")), "cannot be parsed"),
    ("host.kernel", "problem", on_host(system=kernel("24.1", system="Darwin")), "Darwin"),
    ("host.page", "ok", on_host(), "one huge page"),
    ("host.page", "warning", on_host(memory=memory(page_is_huge=False)), "4 KiB pages"),
    ("host.page", "note", replace(GOOD, memory=memory(page_is_huge=False)), "4 KiB pages"),
    ("host.page", "problem", on_host(memory=memory(page_error="no room")), "no room"),
    ("host.page", "note", with_packages(native_error="gone"), "not tested"),
    ("host.hugepages", "ok", on_host(), "enabled=madvise, shmem_enabled=never"),
    ("host.hugepages", "warning", on_host(memory=memory(thp_shmem="deny")), "shmem_enabled=deny"),
    ("host.hugepages", "warning", on_host(memory=memory(thp_enabled=None)), "enabled=missing"),
    ("host.hugepages", "note", replace(GOOD, memory=memory(thp_shmem="deny")), "deny"),
    # ----------------------------------------------------------------------------------- limits
    ("limits.memory", "ok", on_host(), "40.00 GiB"),
    (
        "limits.memory",
        "ok",
        with_config(on_host(), host_memory_bytes=32 * GIB),
        "KVELASTIC_HOST_MEMORY is 32.00 GiB",
    ),
    (
        "limits.memory",
        "problem",
        with_config(on_host(), host_memory_bytes=41 * GIB),
        "KVELASTIC_HOST_MEMORY is 41.00 GiB; this process can use 40.00 GiB",
    ),
    ("limits.memory", "note", with_config(host_memory_bytes=41 * GIB), "41.00 GiB"),
    ("limits.mappings", "ok", on_host(), "need up to 40960"),
    ("limits.mappings", "ok", replace(GOOD, limits=limits(max_map_count=9)), "GPU pages do not"),
    ("limits.mappings", "note", on_host(limits=limits(max_map_count=None)), "cannot be read"),
    ("limits.mappings", "warning", on_host(limits=limits(max_map_count=40959)), "need up to 40960"),
    (
        "limits.mappings",
        "ok",
        with_config(on_host(limits=limits(max_map_count=24576)), page_bytes=4 * MIB),
        "need up to 24576",
    ),
    ("limits.files", "ok", GOOD, "20000"),
    ("limits.files", "ok", replace(GOOD, limits=limits(open_files=None)), "unlimited"),
    ("limits.files", "warning", replace(GOOD, limits=limits(open_files=1023)), "1023"),
    ("limits.files", "ok", replace(GOOD, limits=limits(open_files=1024)), "1024"),
    ("limits.files", "warning", replace(GOOD, limits=limits(open_files=64)), "64"),
    ("limits.files", "problem", replace(GOOD, limits=limits(open_files=63)), "63"),
    ("limits.addresses", "ok", GOOD, "unlimited"),
    (
        "limits.addresses",
        "warning",
        on_host(limits=limits(address_space_bytes=32 * GIB)),
        "32.00 GiB",
    ),
    (
        "limits.addresses",
        "problem",
        on_host(limits=limits(address_space_bytes=31 * GIB)),
        "31.00 GiB",
    ),
    (
        "limits.addresses",
        "problem",
        replace(GOOD, limits=limits(address_space_bytes=99 * GIB)),
        "99.00 GiB",
    ),
    ("limits.overcommit", "ok", GOOD, "vm.overcommit_memory=0"),
    ("limits.overcommit", "note", replace(GOOD, limits=limits(overcommit_mode=None)), "cannot"),
    ("limits.overcommit", "note", replace(GOOD, limits=limits(overcommit_mode=2)), "15.00 GiB"),
    ("limits.overcommit", "warning", on_host(limits=limits(overcommit_mode=2)), "15.00 GiB"),
    (
        "limits.overcommit",
        "warning",
        on_host(limits=limits(overcommit_mode=2, committed_bytes=None)),
        "vm.overcommit_memory=2",
    ),
    (
        "limits.overcommit",
        "note",
        on_host(limits=limits(overcommit_mode=2, commit_limit_bytes=33 * GIB)),
        "32.00 GiB",
    ),
    # ------------------------------------------------------------------ shared memory, segments
    ("shm.mount", "ok", GOOD, "tmpfs"),
    ("shm.mount", "warning", shm(filesystem=""), "no file system is mounted"),
    ("shm.mount", "problem", shm(filesystem="", write_error="no such file"), "no file system"),
    ("shm.write", "ok", GOOD, "can be created"),
    ("shm.write", "problem", shm(write_error="Read-only file system"), "Read-only file system"),
    ("shm.locks", "ok", GOOD, "liveness locks work"),
    ("shm.locks", "warning", shm(has_liveness_locks=False), "locks do not work"),
    ("shm.shared", "ok", GOOD, "no instance with another"),
    ("shm.shared", "problem", shm(pids_with_another=(7, 8)), "(process 7, 8)"),
    ("shm.shared", "note", replace(GOOD, system=replace(GOOD.system, is_own_pid_namespace=True)),
     "not visible"),
    ("shm.size", "ok", GOOD, "8.00 GiB of 8.00 GiB"),
    ("shm.size", "warning", shm(size_bytes=64 * MIB, free_bytes=64 * MIB), "64.00 MiB of 64.00"),
    ("shm.size", "warning", shm(free_bytes=15 * MIB), "15.00 MiB of 8.00 GiB"),
    ("shm.size", "ok", shm(free_bytes=16 * MIB), "16.00 MiB of 8.00 GiB"),
    ("shm.size", "warning", shm(free_bytes=266240), "260.00 KiB of 8.00 GiB"),
    ("shm.size", "problem", shm(free_bytes=266239), "a segment needs 260.00 KiB"),
    ("segments.dead", "ok", GOOD, "no segments"),
    ("segments.dead", "warning", segment("dead", pid=7), "s1: its process 7 has ended"),
    ("segments.dead", "note", segment("dead", is_ours=False), "has ended"),
    ("segments.unreadable", "ok", GOOD, "all segments are readable"),
    ("segments.unreadable", "warning", segment("unreadable", problem="version 9"), "s1: version 9"),
    ("segments.orphaned", "warning", segment("orphaned", pid=7), "s1: process 7 is an engine core"),
    ("segments.unknown", "warning", segment("unknown"), "s1: its liveness is unknown"),
    ("segments.hidden", "note", segment("hidden", is_ours=False), "s1 belongs to another user"),
    ("ledgers.usable", "ok", GOOD, "all ledgers are usable"),
    ("ledgers.foreign", "problem", ledger("foreign"), "the ledger of host: belongs to user 7"),
    ("ledgers.unreadable", "problem", ledger("unreadable"), "the ledger of host"),
    ("instances.waiting", "ok", GOOD, "no request needs more memory"),
    ("instances.waiting", "ok", instance(WAITS), "no request needs more memory"),
    ("instances.waiting", "problem", instance(STUCK), "s1: 3 requests wait"),
    ("instances.tiers", "ok", GOOD, "no tier"),
    ("instances.tiers", "ok", instance(CALM), "no tier"),
    ("instances.tiers", "problem", instance(CALM, problem="no room"), "disk is failing: no room"),
    ("instances.tiers", "problem", instance(CALM, is_stuck=True), "s1: disk does not respond"),
    ("permissions.proc", "ok", GOOD, "all processes"),
    ("permissions.proc", "ok", replace(GOOD, system=kernel("6.1", hidepid="off")), "all"),
    ("permissions.proc", "note", replace(GOOD, system=kernel("6.1", hidepid="2")), "hidepid=2"),
    ("permissions.namespace", "ok", GOOD, "the machine's own"),
    (
        "permissions.namespace",
        "note",
        replace(GOOD, system=kernel("6.1", is_own_pid_namespace=True)),
        "container",
    ),
    (
        "permissions.namespace",
        "warning",
        replace(GOOD, system=kernel("6.1", has_pid_namespace=False)),
        "/proc/self/ns/pid",
    ),
    # ----------------------------------------------------------------------------------- config
    ("config.tiers", "ok", GOOD, "all folders"),
    (
        "config.tiers",
        "problem",
        replace(GOOD, tier_folders=(TierFolderFact("disk", "Permission denied: /kv"),)),
        "the disk tier cannot use its folder: Permission denied: /kv",
    ),
    ("config.value", "ok", with_config(names_set=("KVELASTIC_LIMIT",)), "KVELASTIC_LIMIT"),
    ("config.value", "ok", GOOD, "variables set: none"),
    (
        "config.value",
        "problem",
        with_config(errors=(("X", "X='a' is not accepted; set it to b; or c."),)),
        "X='a' is not accepted",
    ),
    ("config.value", "problem", with_config(errors=(("X", "X is odd"),)), "X is odd"),
    ("config.unknown", "ok", GOOD, "no variable"),
    (
        "config.unknown",
        "warning",
        with_config(unknown=(("KVELASTIC_LIMITS", "KVELASTIC_LIMIT"),)),
        "KVELASTIC_LIMITS is not a variable",
    ),
    ("config.kvcached", "ok", GOOD, "no variable"),
    (
        "config.kvcached",
        "note",
        with_config(legacy=(LegacyName("ENABLE_KVCACHED", "ENABLE_KVELASTIC"),)),
        "reads it as ENABLE_KVELASTIC",
    ),
    (
        "config.kvcached",
        "warning",
        with_config(legacy=(LegacyName("ENABLE_KVCACHED", "ENABLE_KVELASTIC", True),)),
        "ENABLE_KVELASTIC is also set",
    ),
    ("config.kvcached", "warning", with_config(legacy=(LegacyName("KVCACHED_X", None),)),
     "has no effect in kvelastic"),
    ("config.enabled", "ok", GOOD, "use kvelastic"),
    ("config.enabled", "note", with_config(enabled=None), "not set"),
    ("config.enabled", "note", with_config(enabled=False), "is false"),
    # ------------------------------------------------------------------------- engines, python
    ("engines.vllm", "ok", GOOD, "0.32.0+cpu"),
    ("engines.vllm", "note", without("vllm"), "not installed"),
    ("engines.vllm", "problem", adding("vllm", "0.31.9"), "vLLM 0.31.9: kvelastic is tested with"),
    ("engines.vllm", "note", adding("vllm", "0.34.0"), "it runs if the functions"),
    (
        "engines.vllm",
        "problem",
        with_config(adding("vllm", "0.34.0"), strict=True),
        "vLLM 0.34.0: kvelastic is tested with",
    ),
    (
        "engines.vllm",
        "warning",
        with_config(adding("vllm", "0.31.9"), strict=False),
        "vLLM 0.31.9",
    ),
    ("engines.vllm", "warning", with_config(adding("vllm", "unknown"), enabled=None), "unknown"),
    ("engines.plugin", "ok", GOOD, "finds the plugin kvelastic"),
    ("engines.plugin", "ok", without("vllm"), "not needed"),
    ("engines.hooks", "ok", with_packages(hooks=(("vllm", ("A.b", "C")),)),
     "2 functions of vLLM: A.b, C"),
    ("engines.hooks", "ok", with_packages(hooks=()), "no supported vLLM is installed"),
    ("engines.plugin", "problem", with_packages(plugins=(("vllm", ("other",)),)), "plugins: other"),
    ("engines.plugin", "problem", allowing("a,b"), "VLLM_PLUGINS='a,b'"),
    ("engines.plugin", "warning", allowing("", enabled=None), "VLLM_PLUGINS=''"),
    ("engines.plugin", "ok", allowing("a,kvelastic"), "finds the plugin kvelastic"),
    ("engines.hooks", "ok", without("vllm"), "no supported transformers is installed"),
    ("engines.transformers", "ok", GOOD, "not installed"),
    ("engines.transformers", "ok", only_transformers(**LOADED), "transformers 5.19.0"),
    ("engines.transformers", "note", only_transformers("5.99.0"), "it runs if the functions"),
    ("engines.transformers", "problem", only_transformers("4.57.1"), "5.17.x, 5.18.x, 5.19.x"),
    ("engines.transformers", "warning", beside_vllm(only_transformers("4.57.1")), "4.57.1"),
    (
        "engines.transformers",
        "warning",
        with_config(only_transformers("4.57.1"), enabled=None),
        "4.57.1",
    ),
    (
        "engines.transformers",
        "warning",
        with_config(only_transformers("4.57.1"), strict=False),
        "4.57.1",
    ),
    ("engines.loading", "ok", GOOD, "not needed"),
    ("engines.loading", "ok", only_transformers(**LOADED), "Python loads kvelastic into"),
    ("engines.loading", "problem", only_transformers(), "no kvelastic.pth in site-packages"),
    (
        "engines.loading",
        "problem",
        only_transformers(site_folders=("/a", "/b")),
        "no kvelastic.pth in /a or /b",
    ),
    (
        "engines.loading",
        "problem",
        only_transformers(start_files=("/a/kvelastic.pth",)),
        "it ignores /a/kvelastic.pth",
    ),
    (
        "engines.loading",
        "problem",
        only_transformers(failure="SyntaxError: a\nb", start_files=("/a/kvelastic.pth",)),
        "SyntaxError: a b",
    ),
    ("engines.loading", "problem", only_transformers(armed=("another",)), "does not load"),
    ("engines.loading", "warning", with_config(only_transformers(), enabled=None), "no kvelastic"),
    ("engines.loading", "warning", beside_vllm(only_transformers()), "no kvelastic.pth"),
    ("engines.sglang", "ok", GOOD, "not installed"),
    ("engines.sglang", "ok", adding("sglang", "0.5.23"), "SGLang 0.5.23"),
    ("engines.sglang", "problem", adding("sglang", "0.5.1"), "tested with 0.5.23"),
    (
        "engines.sglang",
        "warning",
        with_config(adding("sglang", "0.5.1"), strict=False),
        "tested with 0.5.23",
    ),
    ("engines.sglang", "note", without("vllm"), "not installed in this environment"),
    ("engines.probe", "ok", replace(GOOD, probes=()), "nothing to check"),
    ("engines.probe", "ok", probed(hooked=36), "compatible: kvelastic wrapped 36 functions"),
    (
        "engines.probe",
        "problem",
        probed(broken=("It is built differently.\n  - a: expected b\n  - c: expected d\nInstall",)),
        "cannot run in vLLM 0.32.0+cpu: c: expected d",
    ),
    ("engines.probe", "problem", probed(broken=("no\nlist",)), "0.32.0+cpu: no list"),
    (
        "engines.probe",
        "warning",
        with_config(probed(broken=("other",)), enabled=None),
        "cannot run in vLLM 0.32.0+cpu: other",
    ),
    ("engines.probe", "note", probed(missed=("vllm.a: ImportError: b",)), "vllm.a: ImportError: b"),
    ("engines.probe", "warning", probed(failure="died of SIGSEGV"), "died of SIGSEGV"),
    ("engines.kvcached", "ok", GOOD, "not installed"),
    ("engines.kvcached", "note", adding("kvcached", "0.1.3"), "kvcached 0.1.3"),
    (
        "engines.kvcached",
        "problem",
        with_config(adding("kvcached", "0.1.3"), is_kvcached_enabled=True),
        "both would patch",
    ),
    ("python.version", "ok", GOOD, "3.11.7"),
    ("python.version", "ok", with_packages(python=(3, 10, 0)), "3.10.0"),
    ("python.version", "problem", with_packages(python=(3, 9, 2)), "3.9.2"),
    ("python.native", "ok", GOOD, "loads"),
    ("python.native", "problem", with_packages(native_error="no _vmm"), "no _vmm"),
    ("python.torch", "ok", GOOD, "torch 2.13.0"),
    ("python.torch", "note", without("torch"), "not installed"),
]  # fmt: skip
