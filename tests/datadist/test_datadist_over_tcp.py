"""Two clusters that find each other over TCP alone, as on two hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datadist_cluster import Cluster
from ports import free_port
from waiting import wait_until

from kvelastic.shared import link_status, segment
from kvelastic.shared.link_status import NodeStatus

pytestmark = pytest.mark.slow


POOL = '{"memory_size": 33554432}'
ROWS = "CacheDesc(4, [3, 65536], DataType.DT_INT8)"
BLOCKS = "CacheDesc(4, [8, 65536], DataType.DT_INT8)"
ROW = 65536
ONE, TWO = 8_000_000_001, 8_000_000_002


def host(folder: Path, name: str, secret: str, ports: str) -> dict[str, str]:
    """What a cluster's host has."""
    own = folder / name
    own.mkdir(mode=0o700)
    path = own / "secret"
    path.touch(0o600)
    path.write_text(secret)
    return {
        "XDG_RUNTIME_DIR": str(own),
        "KVELASTIC_LINK_SECRET": str(path),
        "KVELASTIC_LINK_DATA_PORTS": ports,
    }


def start(cluster_id: int, environment: dict[str, str], **config: Any) -> Cluster:
    return Cluster(
        cluster_id,
        environment=environment,
        enable_cache_manager=True,
        enable_remote_cache_accessible=True,
        mem_pool_cfg=POOL,
        **config,
    )


@pytest.fixture
def hosts() -> Iterator[Path]:
    """A folder of a short name: sockets' paths have a bound."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder)


@pytest.fixture
def pair(hosts: Path) -> Iterator[tuple[Cluster, Cluster]]:
    at, first = free_port(), free_port()
    ports = f"{first}-{min(first + 30, 65535)}"
    one = host(hosts, "one", "5" * 64, ports)
    two = host(hosts, "two", "5" * 64, "any")
    with start(ONE, one, listen_ip_info=f"127.0.0.1:{at}") as owner, start(TWO, two) as reader:
        assert reader(f"datadist.link_clusters([cluster({ONE}, {at})])") == [0, [0]]
        node = node_of(ONE)
        assert first <= node.data_port <= first + 30
        assert [(link.peer_id, link.way) for link in node.links] in ([], [(TWO, "tcp")])
        yield owner, reader


def node_of(cluster_id: int) -> NodeStatus:
    (found,) = [one for one in link_status.nodes() if one.node_id == cluster_id]
    assert found.role == "MIX"
    return found


def make_blocks(cluster: Cluster, *, fill: bool) -> None:
    cluster.run(
        f"blocks = manager.allocate_blocks_cache({BLOCKS}, BlocksCacheKey({cluster.cluster_id}))"
    )
    if fill:
        cluster.run(
            f"[write(blocks, t, b * {ROW}, [16 * t + b] * {ROW})"
            " for t in range(4) for b in range(8)]"
        )


def blocks(cluster: Cluster, at: int) -> list[list[int]]:
    """The first and the last byte of a block in each tensor."""
    return cluster(f"[read(blocks, t, {at} * {ROW}, {ROW})[::{ROW - 1}] for t in range(4)]")


def test_blocks_are_pulled_and_pushed_from_either_side(pair: tuple[Cluster, Cluster]) -> None:
    owner, reader = pair
    make_blocks(owner, fill=True)
    make_blocks(reader, fill=False)
    reader.run(f"manager.pull_blocks(BlocksCacheKey({ONE}), blocks, [1, 2, 5], [0, 1, 7])")
    assert blocks(reader, 0) == [[1, 1], [17, 17], [33, 33], [49, 49]]
    assert blocks(reader, 7) == [[5, 5], [21, 21], [37, 37], [53, 53]]
    owner.run(f"manager.pull_blocks(BlocksCacheKey({TWO}), blocks, [7], [0])")
    assert blocks(owner, 0) == blocks(reader, 7)
    reader.run(f"manager.push_blocks(BlocksCacheKey({ONE}), blocks, [0], [3])")
    assert blocks(owner, 3) == blocks(reader, 0)
    owner.run(f"manager.push_blocks(BlocksCacheKey({TWO}), blocks, [6], [4])")
    assert blocks(reader, 4) == [[6, 6], [22, 22], [38, 38], [54, 54]]


def test_rows_are_pulled_and_pushed(pair: tuple[Cluster, Cluster]) -> None:
    owner, reader = pair
    owner.run(f"cache = manager.allocate_cache({ROWS})")
    owner.run(f"[write(cache, t, 0, [t + 1] * {ROW}) for t in range(4)]")
    reader.run(f"cache = manager.allocate_cache({ROWS})")
    at_owner = owner("cache.cache_id")
    key = f"CacheKeyByIdAndIndex({ONE}, {at_owner}, {{}})"
    assert reader.status(f"manager.pull_cache({key.format(0)}, cache, 1)") == "LLM_SUCCESS"
    assert reader(f"[read(cache, t, 2 * {ROW} - 1, 1)[0] for t in range(4)]") == [1, 2, 3, 4]
    assert reader.status(f"manager.push_cache({key.format(2)}, cache, 1)") == "LLM_SUCCESS"
    assert owner(f"[read(cache, t, 3 * {ROW} - 1, 1)[0] for t in range(4)]") == [1, 2, 3, 4]
    (link,) = wait_until(lambda: node_of(TWO).links, "the link is not shown")
    assert (link.peer_id, link.way, link.side) == (ONE, "tcp", "client")


def test_killed_peer_breaks_the_link(pair: tuple[Cluster, Cluster]) -> None:
    owner, reader = pair
    make_blocks(owner, fill=True)
    make_blocks(reader, fill=False)
    owner.kill()
    wait_until(lambda: reader(f"datadist._links._peers[{ONE}].broken is not None"))
    pull = f"manager.pull_blocks(BlocksCacheKey({ONE}), blocks, [1], [0])"
    assert reader.status(pull) == "LLM_LINK_FAILED"
    segment.reap()  # what the killed one has left


def test_different_secret_refuses_the_link(hosts: Path) -> None:
    at = free_port()
    one = host(hosts, "one", "5" * 64, "any")
    two = host(hosts, "two", "6" * 64, "any")
    with start(ONE, one, listen_ip_info=f"127.0.0.1:{at}"), start(TWO, two) as reader:
        status, (of_cluster,) = reader(f"datadist.link_clusters([cluster({ONE}, {at})])")
        assert status != 0
        assert of_cluster != 0
