"""A host whose cable is cut says nothing: the kernel's missing acknowledgements are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from hosts import Host, link
from linked import secret_file
from waiting import DEADLINE_S

pytestmark = [needs.hosts, pytest.mark.slow]


HERE = Path(__file__).parent


def test_lost_host_is_detected(tmp_path: Path) -> None:
    secret_file(tmp_path)

    def start(host: Host, role: str, word: str) -> subprocess.Popen[str]:
        process = host.start(
            *(sys.executable, str(HERE / "lost_host.py"), role, str(tmp_path)),
            environment={**os.environ, "PYTHONPATH": str(HERE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == word
        return process

    with Host() as one, Host() as other:
        link(one, other, "10.77.0.1", "10.77.0.2")
        owner, reader = start(one, "owner", "ready"), start(other, "reader", "linked")
        out, log = reader.communicate("cut\n", timeout=DEADLINE_S)
        assert out.startswith("noticed")
        assert "timed out" in out  # by the acknowledgements, and by nothing that came after
        assert "fault" not in log
        one.kill()
        owner.communicate()
