"""A cluster that is stopped in the middle of many transfers delays no other cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from datadist_cluster import Cluster
from ports import free_port
from waiting import wait_until

from kvelastic.shared import link_status

pytestmark = pytest.mark.slow

POOL = '{"memory_size": 134217728}'
BLOCKS = "CacheDesc(4, [16, 262144], DataType.DT_INT8)"
OWNER, LATE, HEALTHY = 8_000_000_011, 8_000_000_012, 8_000_000_013
THREADS = 16

TRANSFERS = """
def transfer(call, at):
    while True:
        call(BlocksCacheKey({owner}), blocks, [at], [at])

for at in range({threads}):
    for call in (manager.push_blocks, manager.pull_blocks):
        threading.Thread(target=transfer, args=(call, at), daemon=True).start()
"""


@contextlib.contextmanager
def clusters(over: str) -> Iterator[tuple[int, Cluster, Cluster, Cluster]]:
    """The port of the first, which the others have linked."""
    at = free_port()
    with tempfile.TemporaryDirectory(prefix="kv") as folder, ExitStack() as started:
        secret = Path(folder, "secret")
        secret.touch(0o600)
        secret.write_text("5" * 64)
        found: list[Cluster] = []
        for cluster_id in (OWNER, LATE, HEALTHY):
            host = Path(folder, str(cluster_id) if over == "tcp" else "one")
            host.mkdir(mode=0o700, exist_ok=True)
            environment = {"XDG_RUNTIME_DIR": str(host)}
            if over == "tcp":
                environment["KVELASTIC_LINK_SECRET"] = str(secret)
            cluster = started.enter_context(
                Cluster(
                    cluster_id,
                    environment=environment,
                    enable_cache_manager=True,
                    enable_remote_cache_accessible=True,
                    mem_pool_cfg=POOL,
                    **({"listen_ip_info": f"127.0.0.1:{at}"} if cluster_id == OWNER else {}),
                )
            )
            key = f"BlocksCacheKey({cluster_id})"
            cluster.run(f"blocks = manager.allocate_blocks_cache({BLOCKS}, {key})")
            if cluster_id != OWNER:
                linked = cluster(f"datadist.link_clusters([cluster({OWNER}, {at})])")
                assert linked == [0, [0]]
            found.append(cluster)
        owner, late, healthy = found
        yield at, owner, late, healthy


def moved_bytes() -> int:
    """What the late one has copied."""
    return sum(
        link.pulled_bytes + link.pushed_bytes
        for node in link_status.nodes()
        if node.node_id == LATE
        for link in node.links
    )


@pytest.mark.parametrize("over", ["one host", "tcp"])
def test_stopped_cluster_does_not_delay_others(over: str) -> None:
    with clusters(over) as (at, owner, late, healthy):
        late.run(TRANSFERS.format(owner=OWNER, threads=THREADS))
        wait_until(lambda: moved_bytes() > 1 << 24, "it does not copy")
        os.kill(late.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                for block in range(8):
                    key = f"BlocksCacheKey({OWNER})"
                    healthy.run(f"manager.pull_blocks({key}, blocks, [{block}], [0])")
                    healthy.run(f"manager.push_blocks({key}, blocks, [0], [{block}])")
                    owner.run(
                        f"manager.pull_blocks(BlocksCacheKey({HEALTHY}), blocks, [0], [{block}])"
                    )
                assert healthy(f"datadist.unlink_clusters([cluster({OWNER}, {at})])") == [0, [0]]
                assert healthy(f"datadist.link_clusters([cluster({OWNER}, {at})])") == [0, [0]]
        finally:
            os.kill(late.pid, signal.SIGCONT)
            late.kill()
