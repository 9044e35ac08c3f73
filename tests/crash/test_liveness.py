"""Who is alive, judged from where it is hard to see: the living keep what they have.

Each of these once removed a live instance's segment and granted its memory a second time, or kept
a dead one's for ever. Namespaces and mounts need root; where the machine does not allow them, the
test says so and is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_instance import Instance
from processes import run_python
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import ledger, segment

MIB = 1 << 20
KVCTL = str(Path(sys.executable).with_name("kvctl"))
GROUP = f"lock-{os.getpid()}"
# Pages of 2 MiB with four blocks: twelve blocks are three pages, and with page 0 make eight.
HELD_BLOCKS = 12


def needs(*unshare: str, script: str = "true") -> None:
    """Skip the test where these namespaces, or what the script does in them, are not to be had."""
    tried = subprocess.run(
        ["unshare", *unshare, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"unshare {' '.join(unshare)}: {script}: {tried.stderr.strip()}")


def kvctl(*arguments: str, unshare: tuple[str, ...] = (), script: str = "true") -> str:
    """What kvctl prints (both streams), in namespaces of its own after a script."""
    command = [KVCTL, *arguments]
    if unshare:
        needs(*unshare, script=script)
        command = ["unshare", *unshare, "sh", "-c", f'{script} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def member() -> ledger.Member | None:
    """Of the one ledger of these tests, the one member."""
    info = next((info for info in ledger.list_ledgers() if info.group == GROUP), None)
    return info.members[0] if info is not None and info.members else None


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setenv("KVELASTIC_LEDGER", GROUP)
    with Instance(KVELASTIC_HOST_MEMORY="64M") as made:
        assert made.alloc(HELD_BLOCKS) is not None
        yield made
    segment.reap()
    ledger.reap()
    assert member() is None


def grant_matches_usage(instance: Instance) -> bool:
    """Pages that come ahead of demand, or go when idle, may be on their way between two looks."""
    wait_until(lambda: (mine := member()) and mine.granted_bytes == instance.ask("granted") > 0)
    return True


def is_intact(instance: Instance) -> bool:
    """Whether it has its name, its place and its grant, and answers."""
    mine = member()
    answer = segment.request(instance.name, priority=2, wait_s=DEADLINE_S)
    return (
        mine is not None
        and (mine.status, mine.pid) == ("alive", instance.pid)
        and grant_matches_usage(instance)
        and segment.inspect(instance.name).status == "alive"
        and answer.state == "applied"
    )


# ------------------------------------------------------------------------------------- the living

HIDDEN = {
    "a /proc with processes only": (
        ("-m", "--propagation", "private"),
        "mount -t proc -o subset=pid proc /proc",
    ),
    "no boot id": (
        ("-m", "--propagation", "private"),
        "mount --bind /dev/null /proc/sys/kernel/random/boot_id",
    ),
    "no /proc": (("-m", "--propagation", "private"), "mount -t tmpfs tmpfs /proc"),
    "another time": (("-T", "--boottime", "1000", "-f"), "true"),
    "other pids": (("-p", "-f", "--mount-proc"), "true"),
    "other pids, their old /proc": (("-p", "-f"), "true"),
    "other users": (("-U", "-r"), "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HIDDEN)
def test_live_instance_survives_gc_from_other_namespaces(instance, how):
    unshare, script = HIDDEN[how]
    for command in (["list", "--json"], ["gc"], ["list", "--json"]):
        said = kvctl(*command, unshare=unshare, script=script)
        assert "Removed" not in said
    row = next(row for row in json.loads(said) if row["name"] == instance.name)
    assert row["alive"]
    assert row["state"] != "dead"
    assert is_intact(instance)


FEW_DESCRIPTORS = """
import os, resource, sys
from kvelastic import _vmm
from kvelastic.shared import ledger, segment
left = int(sys.argv[1])
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, lowest + left))
print(segment.reap(), ledger.reap(), flush=True)
"""


@pytest.mark.parametrize("left", range(6))
def test_reap_with_few_descriptors_keeps_live_instances(instance, left):
    assert run_python("-c", FEW_DESCRIPTORS, str(left)).stdout == "[] []\n"
    assert is_intact(instance)


def test_stopped_instance_is_alive(instance):
    instance.stop()
    assert "Removed" not in kvctl("gc")
    instance.go_on()
    assert is_intact(instance)


@pytest.mark.slow
def test_read_only_mount_allows_only_inspection(instance):
    private = ("-m", "--propagation", "private")
    read_only = "mount --bind /dev/shm /dev/shm && mount -o remount,ro,bind /dev/shm"

    def state() -> str:
        rows = json.loads(kvctl("list", "--json", unshare=private, script=read_only))
        return str(next(row["state"] for row in rows if row["name"] == instance.name))

    assert state() not in {"dead", "unknown"}
    instance.kill()
    assert state() == "dead"
    assert segment.inspect(instance.name).status == "dead"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_determines_liveness_of_another_users_instance():
    # The other user may not be able to read this environment: what is needed is imported before.
    segment.create(None, engine="other").close()
    said, word = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
            with segment.create(None, engine="other", device="host") as own:
                os.write(word, own.name.encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(word)
    name = os.read(said, 100).decode()
    os.close(said)
    try:
        assert segment.inspect(name).status == "alive"
        assert name not in segment.reap()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    info = segment.inspect(name)
    assert (info.status, info.is_ours) == ("dead", False)
    assert name not in segment.reap()
    (segment.SHM_DIR / name).unlink()


# --------------------------------------------------------------------------------------- the dead


def test_gc_frees_the_grant_of_an_ended_container(monkeypatch):
    """Neither gc nor delete --force freed it, and nothing but a restart of the machine did."""
    needs("-p", "-f", "--mount-proc", "--kill-child")
    monkeypatch.setenv("KVELASTIC_LEDGER", GROUP)
    program = Path(__file__).parents[1] / "programs" / "ledger_instance.py"
    container = subprocess.Popen(
        ["unshare", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KVELASTIC_HOST_MEMORY": "64M"},
    )
    with container:
        name = json.loads(container.stdout.readline())["name"]
        container.stdin.write('["alloc", 12]\n')
        container.stdin.flush()
        container.stdout.readline()
        try:
            assert segment.inspect(name).status == "alive"
            assert "Removed" not in kvctl("gc")
            assert member().status == "alive"
            assert member().granted_bytes > 0
        finally:
            container.kill()
            container.wait()
        # --kill-child is a signal on its way: the kernel's word is awaited, not a time.
        wait_until(lambda: segment.inspect(name).status == "dead")
        assert name in kvctl("gc")
        assert member() is None


def test_pages_mapped_by_a_forked_child_stay_granted(instance):
    """On the host it has its parent's pages, and they are memory as long as it lives."""
    child = int(instance.ask("fork_and_pause"))
    try:
        instance.kill()
        assert segment.inspect(instance.name).status == "dead"  # nobody answers
        segment.reap()
        assert member().status == "alive"
        assert member().granted_bytes > 0
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: (ledger.reap(), member())[1] is None)


ORDER = """
import mmap, os, signal, sys, threading
from kvelastic import _vmm
lock_first, threads, close_file, directory, file = sys.argv[1:]
size = 256 << 20
own = os.open(file, os.O_RDWR)
ready, word = os.pipe()
child = os.fork()
if child == 0:
    lock = _vmm.LivenessLock.hold(file, own, 3) if lock_first == "1" else None
    fd = os.open(directory + "/memory", os.O_RDWR | os.O_CREAT)
    os.unlink(directory + "/memory")
    os.posix_fallocate(fd, 0, size)
    pages = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if close_file == "1":
        os.close(fd)
    lock = lock or _vmm.LivenessLock.hold(file, own, 3)
    for _ in range(int(threads) - 1):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.write(word, b"x")
    while True:
        signal.pause()
os.read(ready, 1)
judge = os.open(file, os.O_RDONLY)
assert _vmm.liveness_of(judge, 3) == "alive"
def used_bytes():
    state = os.statvfs(directory)
    return (state.f_blocks - state.f_bfree) * state.f_frsize
assert used_bytes() >= size
os.kill(child, signal.SIGKILL)
while _vmm.liveness_of(judge, 3) == "alive":
    pass
print(used_bytes(), flush=True)
os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lock_first", [True, False])
@pytest.mark.parametrize("threads", [1, 6])
@pytest.mark.parametrize("close_file", [True, False])
def test_memory_is_freed_before_the_liveness_lock(tmp_path, lock_first, threads, close_file):
    """In a tmpfs of its own, where what is used is counted exactly."""
    private = ("-m", "--propagation", "private")
    script = f"mount -t tmpfs -o size=300m tmpfs {tmp_path}"
    needs(*private, script=script)
    file = segment.SHM_DIR / f".kvtest_order_{os.getpid()}"
    file.touch()
    try:
        done = subprocess.run(
            [
                *("unshare", *private, "sh", "-c", f'{script} && exec "$@"', "sh"),
                *(sys.executable, "-c", ORDER, str(int(lock_first)), str(threads)),
                *(str(int(close_file)), str(tmp_path), str(file)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        file.unlink()
    assert int(done.stdout) < MIB


# ------------------------------------------------------------------------- those nobody can ask


NO_TMPFS = """
import json, os, signal, subprocess, sys
from kvelastic.shared import ledger, segment
sys.path.insert(0, sys.argv[1])
from ledger_instance import Instance
with Instance(KVELASTIC_HOST_MEMORY="64M") as a, Instance(KVELASTIC_HOST_MEMORY="64M") as b:
    a.alloc(12)
    said = [segment.inspect(a.name).status, segment.reap()]
    a.kill()
    said += [segment.inspect(a.name).status, segment.reap(), len(ledger.list_ledgers()[0].members)]
segment.delete(a.name, force=True)
print(json.dumps([*said, [m.status for m in ledger.list_ledgers()[0].members]]))
"""


@pytest.mark.slow
def test_liveness_is_unknown_on_another_file_system(tmp_path):
    private = ("-m", "--propagation", "private")
    shm = tmp_path / "shm"
    shm.mkdir()
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("the temporary directory is a tmpfs too")
    script = f"mount --bind {shm} /dev/shm"
    needs(*private, script=script)
    done = subprocess.run(
        [
            *("unshare", *private, "sh", "-c", f'{script} && exec "$@"', "sh"),
            *(sys.executable, "-c", NO_TMPFS, str(Path(__file__).parents[1] / "programs")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["unknown", [], "unknown", [], 2, ["unknown"]]
