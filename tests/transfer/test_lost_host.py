"""A host whose cable is cut says nothing: the kernel's missing acknowledgements are noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from linked import secret_file
from waiting import DEADLINE_S

pytestmark = pytest.mark.slow


HERE = Path(__file__).parent


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    names = (f"kv{os.getpid()}a", f"kv{os.getpid()}b")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("netns", "add", names[1])
        ip(*f"link add kvx0 netns {names[0]} type veth peer name kvx1 netns {names[1]}".split())
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"kvx{number}")
            ip("-n", name, "link", "set", f"kvx{number}", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_lost_host_is_detected(hosts: tuple[str, str], tmp_path: Path) -> None:
    secret_file(tmp_path)
    processes = []

    def start(host: str, role: str, word: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, HERE / "lost_host.py", role, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == word
        return process

    try:
        start(hosts[0], "owner", "ready")
        reader = start(hosts[1], "reader", "linked")
        out, log = reader.communicate("cut\n", timeout=DEADLINE_S)
        assert out.startswith("noticed")
        assert "timed out" in out  # by the acknowledgements, and by nothing that came after
        assert "fault" not in log
    finally:
        for process in processes:
            process.kill()
            process.communicate()
