"""`scripts/demo --cluster` with fake engines, where namespaces are not allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from hosts import Host
from waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.matrix, needs.ray, needs.hosts]

ROOT = Path(__file__).parents[2]
FOLDERS = ("scripts/_demo", "tests/programs", "tests/cluster")
STORY = f"""
import sys
from pathlib import Path
import cluster

def config_of(model, folder, capacity_mib):
    def each(name, replicas):
        fake = {str(ROOT / "tests" / "fakes" / "engine.py")!r}
        arguments = ["--instance", "--outlives-its-parent", "--model", name, "--port", "{{port}}"]
        return {{
            "name": name,
            "command": [sys.executable, fake, *arguments],
            "env": {{"KVELASTIC_HOST_MEMORY": f"{{capacity_mib}}M"}},
            "guarantee": "32M",
            "replicas": replicas,
            "replicas_per_node": 1,
            "num_cpus": 0.1,
        }}
    return {{
        "models": [each(cluster.FIRST, 2), each(cluster.SECOND, 1)],
        "front": {{"resources": {{"host0": 0.01}}}},
        "health": {{"timeout": 3}},
    }}

cluster.config_of = config_of
sys.exit(cluster.main(Path()))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray's sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="kv") as made:
        yield Path(made)


def test_demo_without_namespaces_leaves_nothing(folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in FOLDERS),
        "TMPDIR": str(folder),
    }
    with Host() as host:
        # A container's root usually lacks this capability, too.
        command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-u", "-c", STORY]
        demo = host.start(
            *command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = demo.communicate(timeout=3 * DEADLINE_S)
        assert demo.returncode == 0, said
        assert "the hosts are two Ray nodes" in said
        wait_until(lambda: [each.pid for each in host.find()] == [host.first.pid])
        left = subprocess.run(host.command("ls", "-A", "/dev/shm"), check=True, capture_output=True)
    assert left.stdout == b""
    assert list(folder.iterdir()) == []
