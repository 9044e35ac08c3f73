"""What the doctor reads of a machine: from folders that stand for / and from real processes."""

from __future__ import annotations

import os
import platform
import random
import re
import resource
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from segment_owner import Owner, engine_core
from waiting import DEADLINE_S, wait_until

from kvelastic.doctor import gather as packages_module
from kvelastic.doctor import gather_config as config_gatherer
from kvelastic.doctor.children import ask_gpus
from kvelastic.doctor.facts import Gpu, GpuFacts, LegacyName
from kvelastic.doctor.gather import (
    gather_ledgers,
    gather_limits,
    gather_memory,
    gather_packages,
    gather_segments,
    gather_shm,
    gather_system,
)
from kvelastic.doctor.gather_config import gather_config, gather_tier_folders
from kvelastic.errors import InvalidArgumentError
from kvelastic.shared.ledger import ledger_path
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.tier_list import parse_tiers
from kvelastic.tiers.stores.disk.folder import Folder as DiskFolder
from kvelastic.tiers.stores.folder.store import FolderStore

SHM = Path("/dev/shm")


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def name():
    unique = f"kvelastic_doctor_{os.getpid()}_{random.randrange(1 << 40):x}"
    yield unique
    (SHM / unique).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------ the system


def test_shm_is_read_below_another_root(tmp_path):
    write(tmp_path, "proc/self/mounts", "proc /proc proc rw 0 0\nshm /dev/shm tmpfs rw,size=1k 0 0")
    (tmp_path / "dev/shm").mkdir(parents=True)
    shm = gather_shm(tmp_path)
    assert shm.filesystem == "tmpfs"
    assert shm.needed_bytes > 1000
    assert 0 < shm.free_bytes <= shm.size_bytes
    assert list((tmp_path / "dev/shm").iterdir()) == []


def test_missing_shm_is_reported(tmp_path):
    shm = gather_shm(tmp_path)
    assert (shm.filesystem, shm.size_bytes) == ("", 0)
    assert shm.write_error == "No such file or directory"


def test_ledgers_in_another_shm_name_their_processes(tmp_path):
    shm = tmp_path / "dev/shm"
    shm.mkdir(parents=True)
    device = shm.stat().st_dev
    ours = f"{os.major(device):02x}:{os.minor(device):02x}"
    line = "00010000-00011000 ---s 00000000 {} 3    {}.kvelastic_ledger_g_host{}\n"
    for pid, device_of_file, where, end in (
        (11, ours, "/dev/shm/", ""),
        (12, "7f:01", "/dev/shm/", ""),
        (13, "7f:01", "/", " (deleted)"),
    ):
        write(
            tmp_path,
            f"proc/{pid}/maps",
            "7f00-7f01 r-xp 0 00:00 0 \n" + line.format(device_of_file, where, end),
        )
    write(tmp_path, "proc/14/maps", "00010000-00011000 r--p 00000000 7f:01 3 /usr/lib/x.so\n")
    (tmp_path / "proc/15").mkdir()
    assert gather_shm(tmp_path).pids_with_another == (12, 13)


def test_shm_of_this_machine_is_writable():
    shm = gather_shm(Path("/"))
    assert shm.write_error == ""
    assert shm.has_liveness_locks


def test_dead_and_unreadable_segments_are_reported_and_kept(name):
    with Owner(name) as owner:
        assert name not in [segment.name for segment in gather_segments(SHM)]
        owner.kill()
        (dead,) = (segment for segment in gather_segments(SHM) if segment.name == name)
        assert (dead.status, dead.header["pid"]) == ("dead", owner.pid)
        assert (SHM / name).exists()
    (SHM / name).write_bytes(b"KVELASTC" + (99).to_bytes(4, "little") + bytes(500))
    found = next(segment for segment in gather_segments(SHM) if segment.name == name)
    assert (found.status, found.is_ours) == ("unreadable", True)
    assert "version 99" in found.problem


def test_engine_core_without_server_is_reported(name):
    for has_server in (True, False):
        with engine_core(name, has_server=has_server) as core:
            found = [segment for segment in gather_segments(SHM) if segment.name == name]
            core.finish()
        assert [segment.status for segment in found] == ([] if has_server else ["orphaned"])


def test_unreadable_ledger_is_reported_and_kept():
    path = ledger_path(f"doctor-{os.getpid()}", "host")
    path.write_bytes(b"KVLEDGER" + (99).to_bytes(4, "little") + bytes(500))
    try:
        found = next(ledger for ledger in gather_ledgers() if "version 99" in ledger.problem)
        assert found.status == "unreadable"
        assert path.exists()
    finally:
        path.unlink()


def test_only_inaccessible_files_with_prefix_are_hidden(tmp_path, monkeypatch):
    for file in ("kvelastic_theirs", "kvelastic_open", "psm_theirs"):
        write(tmp_path, file, "")
    (tmp_path / "kvelastic_folder").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path))
    assert "kvelastic_theirs" not in [found.name for found in gather_segments(tmp_path)]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = [found for found in gather_segments(tmp_path) if found.status == "hidden"]
    assert found == [SegmentInfo("kvelastic_theirs", "hidden", is_ours=False)]
    monkeypatch.setattr(os, "access", real)


def test_memory_facts_use_tightest_cgroup_limit(tmp_path):
    thp = "sys/kernel/mm/transparent_hugepage"
    write(tmp_path, f"{thp}/enabled", "always madvise [never]\n")
    write(tmp_path, f"{thp}/shmem_enabled", "always within_size advise never [deny] force\n")
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "1048576\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    memory = gather_memory(tmp_path)
    assert (memory.thp_enabled, memory.thp_shmem) == ("never", "deny")
    assert memory.machine_bytes == 1 << 20
    assert memory.page_error == ""


def test_memory_of_a_kernel_without_huge_pages(tmp_path):
    memory = gather_memory(tmp_path)
    assert (memory.thp_enabled, memory.thp_shmem) == (None, None)


def test_failed_page_creation_is_reported(monkeypatch, tmp_path):
    from kvelastic import _vmm

    def refuse() -> object:
        raise MemoryError("no memfd for you")

    monkeypatch.setattr(_vmm, "HostDriver", refuse)
    assert gather_memory(tmp_path).page_error == "no memfd for you"


def test_page_without_huge_pages_is_reported(monkeypatch, tmp_path):
    from kvelastic import _vmm

    destroyed = []
    driver = SimpleNamespace(
        create=lambda _: 7,
        stats=lambda: {"small_pages": 1},
        destroy=lambda handle, _: destroyed.append(handle),
    )
    monkeypatch.setattr(_vmm, "HostDriver", lambda: driver)
    memory = gather_memory(tmp_path)
    assert (memory.page_error, memory.page_is_huge, destroyed) == ("", False, [7])


def test_resource_limits_are_read(tmp_path):
    write(tmp_path, "proc/sys/vm/max_map_count", "262144\n")
    write(tmp_path, "proc/sys/vm/overcommit_memory", "2\n")
    write(
        tmp_path,
        "proc/meminfo",
        "MemTotal:  100 kB\nCommitLimit:   2048 kB\nCommitted_AS: 1 kB\nHugePages_Total:  3\n",
    )
    soft = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    limits = gather_limits(tmp_path, lambda which: (soft[which], 1 << 40))
    assert (limits.max_map_count, limits.overcommit_mode) == (262144, 2)
    assert (limits.commit_limit_bytes, limits.committed_bytes) == (2 << 20, 1024)
    assert (limits.open_files, limits.address_space_bytes) == (256, None)


def test_unreadable_limits_are_none(tmp_path):
    limits = gather_limits(tmp_path)
    assert (limits.max_map_count, limits.overcommit_mode) == (None, None)
    assert (limits.commit_limit_bytes, limits.committed_bytes) == (None, None)


@pytest.mark.parametrize(
    ("mounts", "link", "expected"),
    [
        ("", None, ("0", False, False)),
        ("proc /proc proc rw,relatime 0 0", "pid:[4026531836]", ("0", True, False)),
        ("proc /proc proc rw,hidepid=invisible 0 0", "pid:[4026532177]", ("invisible", True, True)),
        ("x /proc proc hidepid=2 0 0\nx /proc proc rw 0 0", "pid:[1]", ("0", True, True)),
    ],
)
def test_system(tmp_path, mounts, link, expected):
    write(tmp_path, "proc/self/mounts", mounts)
    if link is not None:
        (tmp_path / "proc/self/ns").mkdir()
        (tmp_path / "proc/self/ns/pid").symlink_to(link)
    system = gather_system(tmp_path)
    assert (system.hidepid, system.has_pid_namespace, system.is_own_pid_namespace) == expected
    assert system.kernel == platform.release()


# ------------------------------------------------------------------------------------------ GPUs


def ask(script: str, root: Path, **environ: str) -> GpuFacts:
    """What is understood of a child that is this shell script."""
    return ask_gpus(
        root, dict(os.environ) | environ, command=("sh", "-c", script), timeout_s=DEADLINE_S
    )


def test_child_output_is_parsed(tmp_path):
    facts = ask(
        """echo '{"nvml_error": "none"}'
        echo '{"cuda_version": 12040}'
        echo 'a library greets'; echo '{"its": "json"}'; echo '[1]'; echo '{"gpu": {"odd": 1}}'
        echo '{"count": 1}'
        echo '{"gpu": {"ordinal": 0, "name": "H200", "total_bytes": 5}}'""",
        tmp_path,
    )
    assert facts == GpuFacts(
        nvml_error="none", cuda_version=12040, count=1, gpus=(Gpu(0, "H200", total_bytes=5),),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("echo '{\"cuda_version\": 12000}'; kill -SEGV $$", "died of SIGSEGV"),
        ("echo '{\"cuda_version\": 12000}'; echo why >&2; exit 3", "ended with exit code 3: why"),
        ('echo \'{"cuda_version": 12000}\'; echo \'{"child_end": "failed: X"}\'', "failed: X"),
    ],
)
def test_dead_child_is_reported_with_its_output(tmp_path, script, end):
    facts = ask(script, tmp_path)
    assert (facts.child_end, facts.cuda_version) == (end, 12000)


@pytest.mark.slow
def test_hanging_child_is_killed(tmp_path):
    """It waits for somebody to write into a pipe that nobody knows of."""
    script = f"cd {tmp_path}; echo $$ >pid; echo '{{\"count\": 5}}'; exec cat pipe"
    os.mkfifo(tmp_path / "pipe")

    def count() -> int:
        facts = ask_gpus(tmp_path, command=("sh", "-c", script), timeout_s=1)
        assert facts.child_end == "gave no answer within 1 s"
        return facts.count

    assert wait_until(count, "it has no time to say anything") == 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_child_that_cannot_start_is_reported(tmp_path):
    facts = ask_gpus(tmp_path, command=(str(tmp_path / "nothing"),))
    assert facts.child_end.startswith("could not be started: ")


def test_kernel_module_version_is_read(tmp_path):
    write(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2025\nGCC: 13.2\n",
    )
    write(tmp_path, "dev/nvidia0", "")
    facts = ask("true", tmp_path, CUDA_VISIBLE_DEVICES="1")
    assert (facts.kernel_module, facts.has_device_files) == ("580.82.07", True)
    assert facts.visible_devices == "1"


def test_missing_driver_is_reported(tmp_path):
    write(tmp_path, "dev/nvidiactl", "")
    facts = ask("true", tmp_path)
    assert (facts.kernel_module, facts.has_device_files) == ("", False)


def test_the_child_ignores_the_working_directory(tmp_path, monkeypatch):
    """A file that happens to lie there must not be run as a module of Python's or ours."""
    write(tmp_path, "json.py", "raise SystemExit(7)")
    write(tmp_path, "kvelastic/__init__.py", "raise SystemExit(8)")
    monkeypatch.chdir(tmp_path)
    assert ask_gpus(tmp_path).child_end == ""


# ----------------------------------------------------------------------------- config, packages


def test_invalid_variables_are_reported_and_valid_ones_used():
    config = gather_config(
        {
            "KVELASTIC_LIMIT": "banana",
            "KVELASTIC_GPU_UTILIZATION": "2",
            "KVELASTIC_DEVICE": "cuda:1",
            "KVELASTIC_HOST_MEMORY": "1G",
            "KVELASTIC_PAGE_SIZE_MB": "4",
            "ENABLE_KVELASTIC": "yes",
            "KVELASTIC_STRICT": "  ",
            "VLLM_PLUGINS": "a",
        }
    )
    assert [name for name, _ in config.errors] == ["KVELASTIC_GPU_UTILIZATION", "KVELASTIC_LIMIT"]
    assert "banana" in config.errors[1][1]
    assert (config.device, config.host_memory_bytes, config.page_bytes) == (
        "cuda:1",
        1 << 30,
        4 << 20,
    )
    assert (config.enabled, config.strict) == (True, None)
    assert config.allowed_plugins == (("vllm", "a"),)
    assert "KVELASTIC_DEVICE" in config.names_set
    assert "KVELASTIC_LIMIT" not in config.names_set


def test_contradicting_values_are_reported():
    config = gather_config(
        {"KVELASTIC_MIN_RESERVED_PAGES": "9", "KVELASTIC_MAX_RESERVED_PAGES": "3"}
    )
    assert [name for name, _ in config.errors] == ["KVELASTIC_MAX_RESERVED_PAGES"]


def _file(path: Path) -> Path:
    path.touch()
    return path / "kv"


def _link(path: Path) -> Path:
    path.symlink_to(path.parent)
    return path


def _open_to_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.mark.parametrize("kind", ["disk", "folder"])
@pytest.mark.parametrize("make", [_file, _link, _open_to_all])
def test_unusable_tier_folder_is_found_before_the_start(tmp_path, kind, make):
    folder = str(make(tmp_path / "tier"))
    (fact,) = gather_tier_folders(parse_tiers(f"{kind}:{folder}:1G"))
    assert fact.tier == kind
    with pytest.raises(InvalidArgumentError, match=re.escape(fact.problem)):
        DiskFolder(folder) if kind == "disk" else FolderStore(folder, 4096)


def test_a_folder_that_cannot_be_created(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    (fact,) = gather_tier_folders(parse_tiers(f"disk:{tmp_path}/a/b:1G"))
    assert fact.problem.startswith(f"{tmp_path}/a/b cannot be created: {tmp_path} is not writable")


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_usable_tier_folder_is_ok_and_unchanged(tmp_path, kind):
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    missing = tmp_path / "missing" / "kv"
    for folder in (kept, missing):
        assert gather_tier_folders(parse_tiers(f"{kind}:{folder}:1G")) == ()
    assert list(tmp_path.iterdir()) == [kept]
    assert list(kept.iterdir()) == []


def test_a_folder_whose_file_system_does_not_respond(monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(config_gatherer, "why_unusable", lambda *_: forever.wait() and "")
    (fact,) = gather_tier_folders(parse_tiers("disk:/kv:1G"), patience_s=0.01)
    assert fact.problem == "/kv: no response from its file system within 0.01 s"
    forever.set()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVELASTIC_LIMITS", "KVELASTIC_LIMIT"),
        ("KVELASTC_LIMIT", "KVELASTIC_LIMIT"),
        ("ENABLE_KVELASTC", "ENABLE_KVELASTIC"),
        ("KVELASTIC_GPU_UTILISATION", "KVELASTIC_GPU_UTILIZATION"),
        ("kvelastic_limit", None),
        ("PATH", None),
        ("ELASTIC_SEARCH_LIMIT", None),
        ("KVCACHED_LIMIT", None),
        ("KVELASTIC_LIMIT", None),
    ],
)
def test_misspelled_variables_suggest_the_nearest(name, nearest):
    assert gather_config({name: "1"}).unknown == (((name, nearest),) if nearest else ())


def test_unrelated_unknown_name_gets_a_suggestion():
    ((name, nearest),) = gather_config({"KVELASTIC_ZZZ": "1"}).unknown
    assert name == "KVELASTIC_ZZZ"
    assert nearest


def test_kvcached_variables_are_reported():
    config = gather_config(
        {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_LOG_LEVEL": "DEBUG",
            "KVELASTIC_LOG_LEVEL": "INFO",
            "KVCACHED_KV_TRANSFER": "1",
        }
    )
    assert config.legacy == (
        LegacyName("ENABLE_KVCACHED", "ENABLE_KVELASTIC"),
        LegacyName("KVCACHED_KV_TRANSFER", None),
        LegacyName("KVCACHED_LOG_LEVEL", "KVELASTIC_LOG_LEVEL", is_overruled=True),
    )
    assert config.is_kvcached_enabled
    assert config.enabled is True


def test_overridden_legacy_value_is_not_validated():
    assert gather_config({"KVCACHED_PAGE_SIZE_MB": "3"}).errors[0][0] == "KVCACHED_PAGE_SIZE_MB"
    both = {"KVCACHED_PAGE_SIZE_MB": "3", "KVELASTIC_PAGE_SIZE_MB": "2"}
    assert gather_config(both).errors == ()


def test_reading_the_environment_prints_nothing(capfd):
    gather_config({"KVELASTIC_TYPO": "1", "ENABLE_KVCACHED": "1", "KVELASTIC_LIMIT": "x"})
    assert capfd.readouterr() == ("", "")


def test_packages_are_found_without_importing_them(monkeypatch, tmp_path):
    for name, version in (("sglang", "0.5.1"), ("kvcached", "0.1.3")):
        info = tmp_path / f"{name}-{version}.dist-info"
        write(info, "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(tmp_path, "pynvml.py", "raise RuntimeError('imported')")
    write(
        tmp_path,
        "sglang-0.5.1.dist-info/entry_points.txt",
        "[vllm.general_plugins]\nkvelastic = a:b\n",
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test may have imported it
    packages = gather_packages()
    assert packages.version("sglang") == "0.5.1"
    assert packages.version("kvcached") == "0.1.3"
    assert packages.version("nvidia-ml-py") == "unknown"
    assert packages.version("torch") is None
    assert packages.python == sys.version_info[:3]
    assert "kvelastic" in dict(packages.plugins)["vllm"]
    assert packages.native_error == ""


def test_plain_folder_is_not_a_package(monkeypatch, tmp_path):
    (tmp_path / "no_package").mkdir()  # a name that no test before this one has imported
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages_module._version("not-there-at-all", "no_package") is None


def test_installed_kvelastic_plugin_is_found():
    assert "kvelastic" in dict(gather_packages().plugins)["vllm"]
    assert metadata.version("kvelastic")


def test_hooks_are_listed_without_importing_the_engine() -> None:
    code = (
        "import sys; from kvelastic.engines import find; g = find('vllm');"
        "found = g.hooks('0.32.0+cpu');"
        "assert 'Executor.get_class' in found and 'EngineCore.step' in found, found;"
        "assert g.hooks('0.33.1') and g.hooks('0.1.0') == () == g.hooks('');"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
