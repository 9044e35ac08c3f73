"""Two clusters in two processes: pull, push, layers, and every way in which a link ends."""

from __future__ import annotations

from typing import Any

import pytest
from datadist_cluster import Cluster
from ports import free_port
from waiting import wait_until

pytestmark = pytest.mark.slow


POOL = '{"memory_size": 33554432}'
DESC = "CacheDesc(4, [3, 64], DataType.DT_INT8)"
BLOCKS = "CacheDesc(4, [8, 64], DataType.DT_INT8)"


def second(cluster_id: int, **config: Any) -> Cluster:
    chosen: dict[str, Any] = {
        "enable_cache_manager": True,
        "mem_pool_cfg": POOL,
        "host_mem_pool_cfg": POOL,
    }
    return Cluster(cluster_id, **(chosen | config))


@pytest.fixture
def pair():
    """Clusters 1, which listens, and 2, which has linked it; neither remembers remote caches."""
    at = free_port()
    with second(1, listen_ip_info=f"127.0.0.1:{at}") as one, second(2) as two:
        one.port = at
        assert two(f"datadist.link_clusters([cluster(1, {at})])") == [0, [0]]
        yield one, two


@pytest.fixture
def open_pair():
    """The same, with `enable_remote_cache_accessible`."""
    at = free_port()
    with (
        second(1, listen_ip_info=f"127.0.0.1:{at}", enable_remote_cache_accessible=True) as one,
        second(2, enable_remote_cache_accessible=True) as two,
    ):
        one.port = at
        assert two(f"datadist.link_clusters([cluster(1, {at})])") == [0, [0]]
        yield one, two


def make(cluster: Cluster, keys: str = "()", fill: bool = True, name: str = "cache") -> None:
    """A cache of which each row of each tensor is filled with a number of its own."""
    cluster.run(f"{name} = manager.allocate_cache({DESC}, {keys})")
    if fill:
        cluster.run(
            f"[write({name}, t, r * 64, [16 * t + r] * 64) for t in range(4) for r in range(3)]"
        )


def make_blocks(cluster: Cluster, fill: bool = True, key: int | None = None) -> None:
    named = "" if key is None else f", BlocksCacheKey({key})"
    cluster.run(f"blocks = manager.allocate_blocks_cache({BLOCKS}{named})")
    if fill:
        cluster.run(
            "[write(blocks, t, b * 64, [16 * t + b] * 64) for t in range(4) for b in range(8)]"
        )


def row(cluster: Cluster, at: int, name: str = "cache") -> list[int]:
    """The first byte of a row in each tensor."""
    return cluster(f"[read({name}, t, {at} * 64, 1)[0] for t in range(4)]")


# --------------------------------------------------------------------------------------- transfers


def test_pull_consumes_the_key(pair):
    one, two = pair
    make(one, "[CacheKey(1, 7), CacheKey(1, 2**64 - 1), CacheKey(1, 8)]")
    make(two, fill=False)
    one.run("manager.deallocate_cache(cache)")  # the keys keep it
    assert two.status("manager.pull_cache(CacheKey(1, 8), cache, 1)") == "LLM_SUCCESS"
    assert row(two, 1) == [2, 18, 34, 50]
    assert two.status("manager.pull_cache(CacheKey(1, 8), cache)") == "LLM_KV_CACHE_NOT_EXIST"
    assert two.status("manager.pull_cache(CacheKey(1, 7), cache, 0, 8)") == "LLM_SUCCESS"
    assert two("read(cache, 1, 0, 9)") == [16] * 8 + [0]
    assert one("list(manager._caches.pools)[0].pool.blocks.stats()['blocks_used']") == 0


def test_pulling_all_layers_consumes_the_key(pair):
    one, two = pair
    make(one, "[CacheKey(1, 7)]")
    make(two, fill=False)
    pull = "manager.pull_cache(CacheKey(1, 7), cache, 2, src_layer_range={}, dst_layer_range={})"
    assert two.status(pull.format("range(1, 2)", "range(0, 1)")) == "LLM_SUCCESS"
    assert row(two, 2) == [32, 48, 0, 0]
    assert two.status(pull.format("range(1, 2)", "range(1, 2)")) == "LLM_SUCCESS"
    assert two.status(pull.format("range(0, 1)", "range(0, 1)")) == "LLM_SUCCESS"
    assert row(two, 2) == [0, 16, 32, 48]
    assert two.status(pull.format("range(0, 1)", "None")) == "LLM_KV_CACHE_NOT_EXIST"


def test_pull_by_id_keeps_the_row(pair):
    one, two = pair
    make(one)
    make(two, fill=False)
    key = f"CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 2)"
    for _ in range(2):
        assert two.status(f"manager.pull_cache({key}, cache)") == "LLM_SUCCESS"
    assert row(two, 0) == [2, 18, 34, 50]
    wrong = key.replace("2)", "3)")
    assert two.status(f"manager.pull_cache({wrong}, cache)") == "LLM_PARAM_INVALID"
    assert two.status("manager.pull_cache(CacheKeyByIdAndIndex(1, 99), cache)") == (
        "LLM_KV_CACHE_NOT_EXIST"
    )


def test_prefix_key_survives_pulls_until_removed(pair):
    one, two = pair
    make(one, "[CacheKey(1, 2**64 - 1, prefix_id=5)]")
    make(two, fill=False)
    pull = "manager.pull_cache(CacheKey(1, 2**64 - 1, prefix_id={}), cache)"
    for _ in range(2):  # many requests begin with it
        assert two.status(pull.format(5)) == "LLM_SUCCESS"
    one.run("manager.remove_cache_key(CacheKey(1, 2**64 - 1, prefix_id=5))")
    assert two.status(pull.format(5)) == "LLM_PREFIX_NOT_EXIST"


def test_pull_by_id_consumes_keys_of_the_row(pair):
    one, two = pair
    make(one, "[CacheKey(1, 7), CacheKey(1, 8)]")
    make(two, fill=False)
    by_id = f"CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 1)"
    assert two.status(f"manager.pull_cache({by_id}, cache)") == "LLM_SUCCESS"
    assert two.status("manager.pull_cache(CacheKey(1, 8), cache)") == "LLM_KV_CACHE_NOT_EXIST"
    two.run("small = manager.allocate_blocks_cache(CacheDesc(4, [8, 24], DataType.DT_INT8))")
    by_id = by_id.replace("1)", "0)")
    assert two.status(f"manager.pull_blocks({by_id}, small, dst_blocks=[5, 3, 1])") == "LLM_SUCCESS"
    assert two.status("manager.pull_cache(CacheKey(1, 7), cache)") == "LLM_KV_CACHE_NOT_EXIST"


def test_keys_of_registered_caches_survive_pulls(pair):
    one, two = pair
    one.run(
        "data = [ctypes.create_string_buffer(bytes([t]) * 192, 192) for t in range(4)]\n"
        f"kept = manager.register_cache({DESC}, [ctypes.addressof(one) for one in data],"
        " [CacheKey(1, 7)])"
    )
    make(two, fill=False)
    for _ in range(2):
        assert two.status("manager.pull_cache(CacheKey(1, 7), cache)") == "LLM_SUCCESS"
    assert row(two, 0) == [0, 1, 2, 3]
    one.run("manager.unregister_cache(kept.cache_id)")
    assert two.status("manager.pull_cache(CacheKey(1, 7), cache)") == "LLM_KV_CACHE_NOT_EXIST"


def test_both_sides_can_pull_blocks(pair):
    one, two = pair
    make_blocks(one, key=1)
    make_blocks(two, fill=False, key=2)
    two.run("manager.pull_blocks(BlocksCacheKey(1), blocks, [1, 2, 5], [0, 1, 7])")
    assert row(two, 0, "blocks") == [1, 17, 33, 49]
    assert row(two, 7, "blocks") == [5, 21, 37, 53]
    one.run("manager.pull_blocks(BlocksCacheKey(2), blocks, [7], [0])")
    assert row(one, 0, "blocks") == [5, 21, 37, 53]
    for wrong in ("[1], [0, 1]", "[8], [0]", "[0], [8]", "[], []", "[0]"):
        found = two.status(f"manager.pull_blocks(BlocksCacheKey(1), blocks, {wrong})")
        assert found == "LLM_PARAM_INVALID", wrong
    assert two.status("manager.pull_blocks(BlocksCacheKey(1, 3), blocks, [0], [0])") == (
        "LLM_KV_CACHE_NOT_EXIST"
    )


def test_remote_blocks_cache_lookup_is_remembered(open_pair):
    """And again where it has gone: another cache of the same model is found, and none of it."""
    one, two = open_pair
    make_blocks(one, key=1)
    make_blocks(two, fill=False)
    one.run(
        "finds = []; answered = datadist._links._answered\n"
        "def noting(link, asked):\n"
        "    finds.append(type(asked).__name__)\n"
        "    return answered(link, asked)\n"
        "datadist._links._answered = noting"
    )
    pull = "manager.pull_blocks(BlocksCacheKey(1), blocks, [1], [2])"
    push = "manager.push_blocks(BlocksCacheKey(1), blocks, [2], [3])"
    for call in (pull, pull, push, push):
        assert two.status(call) == "LLM_SUCCESS"
    assert one("finds") == ["Find", "Find"]  # a push asks whether it may
    assert row(two, 2, "blocks") == [1, 17, 33, 49]
    one.run("manager.deallocate_blocks_cache(blocks)")
    make_blocks(one, key=1)
    one.run("[write(blocks, t, 64, [100 + t] * 64) for t in range(4)]")
    assert two.status(pull) == "LLM_SUCCESS"
    assert row(two, 2, "blocks") == [100, 101, 102, 103]
    one.run("manager.deallocate_blocks_cache(blocks)")
    assert two.status(pull) == "LLM_KV_CACHE_NOT_EXIST"
    assert two.status(push) == "LLM_KV_CACHE_NOT_EXIST"


def test_pulled_row_fills_several_blocks(pair):
    one, two = pair
    make(one, "[CacheKey(1, 7)]")
    two.run("small = manager.allocate_blocks_cache(CacheDesc(4, [8, 24], DataType.DT_INT8))")
    two.run("manager.pull_blocks(CacheKey(1, 7), small, dst_blocks=[5, 3, 1])")
    assert two("[read(small, 1, b * 24, 1)[0] for b in (5, 3, 1)]") == [16] * 3
    assert two("read(small, 1, 1 * 24 + 15, 2)") == [16, 0]  # 64 bytes are 24 + 24 + 16


def test_a_push_needs_the_option(pair):
    one, two = pair
    make(one)
    make(two)
    key = f"CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 1)"
    assert two.status(f"manager.push_cache({key}, cache)") == "LLM_FEATURE_NOT_ENABLED"


def test_rows_and_blocks_are_pushed(open_pair):
    one, two = open_pair
    make(one, "[CacheKey(1, 7), CacheKey(1, 8)]", fill=False)
    make(two)
    key = f"CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 1)"
    two.run(f"manager.push_cache({key}, cache, 2)")
    assert row(one, 1) == [2, 18, 34, 50]
    # The key of that row is used up, as by a pull.
    assert one("len(manager._caches.of_id(cache.cache_id).rows)") == 1
    assert two.status(f"manager.push_cache({key}, cache, size=8)") == "LLM_PARAM_INVALID"
    make_blocks(one, fill=False, key=1)
    make_blocks(two)
    two.run(
        "manager.push_blocks(BlocksCacheKey(1), blocks, [1, 2], [4, 0], range(1, 2), range(0, 1))"
    )
    assert row(one, 4, "blocks") == [33, 49, 0, 0]
    assert row(one, 0, "blocks") == [34, 50, 0, 0]
    key = "manager.push_blocks(BlocksCacheKey(1), blocks, [1], [4], range(1, 2), range(2))"
    assert two.status(key) == "LLM_PARAM_INVALID"
    assert two.status("manager.pull_cache(CacheKey(1, 7), cache)") == "LLM_PARAM_INVALID"


def test_registered_memory_is_private_unless_shared(pair):
    one, two = pair
    one.run("memory = ctypes.create_string_buffer(bytes(range(192)) * 4, 4 * 192)")
    one.run("addrs = [ctypes.addressof(memory) + 192 * t for t in range(4)]")
    host = DESC.replace("DT_INT8)", "DT_INT8, Placement.HOST)")
    make(two, fill=False)
    pull = "manager.pull_cache(CacheKey(1, {}), cache)"
    one.run(f"kept = manager.register_cache({host}, addrs, [CacheKey(1, 1)])")
    assert two.status(pull.format(1)) == "LLM_PARAM_INVALID"  # host memory: for itself alone
    one.run("manager.unregister_cache(kept.cache_id)")
    one.run(f"shown = manager.register_cache({host}, addrs, [CacheKey(1, 2)], True)")
    assert two.status(pull.format(2)) == "LLM_SUCCESS"
    assert two("read(cache, 3, 0, 3)") == [0, 1, 2]
    again = f"manager.register_cache({host}, addrs, (), True)"
    assert one.status(again) == "LLM_PARAM_INVALID"  # the same memory twice
    one.run("manager.unregister_cache(shown.cache_id)")
    one.run(again)


def test_memory_registered_after_linking_is_private(pair):
    """After its own link, that is: peers may have linked it at any time."""
    one, two = pair
    for cluster in pair:
        cluster.run(
            "memory = ctypes.create_string_buffer(4 * 192);"
            " addrs = [ctypes.addressof(memory) + 192 * t for t in range(4)];"
            f"late = manager.register_cache({DESC}, addrs, [CacheKey(1, 5)])"
        )
        make(cluster)
    pull = "manager.pull_cache(CacheKey({}, 5), cache)"
    assert two.status(pull.format(1)) == "LLM_SUCCESS"
    assert one.status(pull.format(2)) == "LLM_PARAM_INVALID"


# ------------------------------------------------------------------------------------------ layers


def test_layers_are_sent_when_computed(open_pair):
    one, two = open_pair
    make(one, fill=False)
    make(two)
    config = f"TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 1)"
    two.run("steps = Events(2)")
    two.run(
        f"task = manager.transfer_cache_async(cache, steps, [{config}, range(2), range(2), 2)])"
    )
    assert two("task.synchronize(0).name") == "LLM_TIMEOUT"
    assert row(one, 1) == [0, 0, 0, 0]
    two.run("steps.events[0].set(); steps.events[1].set()")
    assert two("task.synchronize().name") == "LLM_SUCCESS"
    assert two("[one.name for one in task.get_results()]") == ["LLM_SUCCESS"]
    assert row(one, 1) == [2, 18, 34, 50]


def test_layers_are_sent_to_raw_addresses(pair):
    one, two = pair
    make_blocks(one, fill=False)
    make(two)
    addrs = one("blocks.tensor_addrs")
    two.run("steps = Events(2); [event.set() for event in steps.events]")
    send = "task = manager.transfer_cache_async(cache, steps, [TransferConfig(1, {}, {}, 1)], {})"
    two.run(send.format([one + 128 for one in addrs[:2]], "range(1, 2)", "None"))
    assert two("task.synchronize().name") == "LLM_SUCCESS"
    assert row(one, 2, "blocks") == [33, 49, 0, 0]
    # A row to blocks of 32 bytes: halves of it.
    blocks = "None, dst_block_indices=[9, 2], dst_block_memory_size=32"
    two.run(send.format(addrs, "None", blocks))
    assert two("task.synchronize().name") == "LLM_SUCCESS"
    assert one("[read(blocks, 2, at * 32, 1)[0] for at in (9, 2, 3)]") == [33, 33, 0]
    two.run(send.format([16, 32], "range(1)", "None"))
    assert two("task.synchronize().name") == "LLM_KV_CACHE_NOT_EXIST"
    for wrong in (([1], "None", "None"), ([1, 2], "range(3)", "None")):
        assert two.status(send.format(*wrong)) == "LLM_PARAM_INVALID"


def test_layered_transfer_uses_the_link_exclusively(pair):
    one, two = pair
    make(one, "[CacheKey(1, 1)]")
    make(two)
    two.run("peer = datadist._links._peer(1)")
    with_layers = "with peer.used(is_layered=True): manager.pull_cache(CacheKey(1, 1), cache)"
    assert two.status(with_layers) == "LLM_LINK_BUSY"
    with_pull = "with peer.used(is_layered=False): print(end='')"
    assert two.status(with_pull) == "LLM_SUCCESS"
    ended = f"datadist.unlink_clusters([cluster(1, {one.port})], 50)"
    two.run(f"with peer.used(is_layered=False): said = {ended}")
    assert two("said[0].name") == "LLM_LINK_BUSY"
    assert two.status("manager.pull_cache(CacheKey(1, 1), cache)") == "LLM_SUCCESS"


def test_a_dead_peer_ends_a_layered_transfer(open_pair):
    one, two = open_pair
    make(one, fill=False)
    make(two)
    config = f"TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, {one('cache.cache_id')}, 1)"
    two.run("steps = Events(2); steps.events[0].set()")
    two.run(
        f"task = manager.transfer_cache_async(cache, steps, [{config}, range(2), range(2), 2)])"
    )
    one.kill()
    two.run("steps.events[1].set()")
    assert two("task.synchronize().name") in {"LLM_LINK_FAILED", "LLM_NOT_YET_LINK"}


# ------------------------------------------------------------------------------------------- links


def test_stopped_peer_times_out_and_can_be_relinked(pair):
    one, two = pair
    make(one, "[CacheKey(1, 1)]")
    make(two)
    pull = "manager.pull_cache(CacheKey(1, 1), cache)"
    one.stop()
    with two.wait_at_most(0.2):
        assert two.status(pull) == "LLM_TIMEOUT"
        assert two.status(pull) == "LLM_WAIT_PROCESS_TIMEOUT"
    said = two(f"datadist.link_clusters([cluster(1, {one.port})], 300)[0].name")
    assert said == "LLM_TIMEOUT"
    one.go_on()
    assert two(f"datadist.link_clusters([cluster(1, {one.port})])[0].name") == "LLM_SUCCESS"
    assert two.status(pull) == "LLM_SUCCESS"
    wait_until(lambda: one("len(datadist._links._node.leases)") == 0, "a lease is left")


def test_killed_peer_breaks_link_and_releases_pins(pair):
    one, two = pair
    make(one, "[CacheKey(1, 1)]")
    make(two, "[CacheKey(2, 1)]")
    two.kill()
    # Its end is an event of the kernel's: no clock is looked at.
    wait_until(lambda: one("datadist._links._peers[2].broken is not None"))
    assert one.status("manager.pull_cache(CacheKey(2, 1), cache)") == "LLM_LINK_FAILED"
    assert one("len(datadist._links._node.leases)") == 0
    assert one("len(list(manager._caches.pools)[0].pool.blocks.pinned())") == 0
    assert one("datadist.unlink_clusters([cluster(2, 1)])[0].name") == "LLM_SUCCESS"
    assert one.status("manager.pull_cache(CacheKey(2, 1), cache)") == "LLM_NOT_YET_LINK"
    with second(2) as again:
        assert again(f"datadist.link_clusters([cluster(1, {one.port})])[0].name") == "LLM_SUCCESS"
        make(again)
        assert again.status("manager.pull_cache(CacheKey(1, 1), cache)") == "LLM_SUCCESS"


def test_link_status_codes(pair):
    one, two = pair

    def link(clusters: str) -> list[str]:
        two.run(f"said = datadist.link_clusters({clusters})")
        return two("[said[0].name, *(code.name for code in said[1])]")

    failed = ["LLM_LINK_FAILED", "LLM_LINK_FAILED"]
    assert link(f"[cluster(1, {one.port})]") == ["LLM_ALREADY_LINK"] * 2
    free = free_port()
    assert link(f"[cluster(9, {free})]") == failed
    two.tell(f"datadist._links.link(cluster(9, {free}), 1e9)")
    why = two.answer()["failed"]
    for said in (f"127.0.0.1_{free}", f"127.0.0.1:{one.port}", "listen_ip_info", "XDG_RUNTIME_DIR"):
        assert said in why
    with second(3, listen_ip_info=f"127.0.0.1:{free}"):
        # Another cluster listens there than the one that is meant.
        assert link(f"[cluster(9, {free})]") == failed
        two.run(f"info = cluster(3, {free}); info.remote_role_type = LLMRole.PROMPT")
        assert link("[info]") == failed
        assert link(f"[cluster(9, 1), cluster(3, {free})]") == [*failed, "LLM_SUCCESS"]
        # Each of these would be taken for a link by a caller that goes on after LLM_ALREADY_LINK.
        two.run("datadist.unlink_clusters([cluster(3, 1)])")
        with second(4) as four, second(2) as double:
            to_one, to_three = f"[cluster(1, {one.port})]", f"[cluster(3, {free})]"
            link_one = f"datadist.link_clusters({to_one})[0].name"
            assert double(link_one) == "LLM_LINK_FAILED"  # one is linked with another cluster 2
            one.run("datadist._links._node._most_links = 1")
            assert four(link_one) == "LLM_CLUSTER_NUM_EXCEED_LIMIT"
            four.run("datadist._links._node._most_links = 0")
            assert four(f"datadist.link_clusters({to_three})[0].name") == (
                "LLM_CLUSTER_NUM_EXCEED_LIMIT"
            )
        assert link(f"[cluster(2, {free})]") == failed
        with second(2, listen_ip_info=f"127.0.0.1:{(own := free_port())}"):
            assert link(f"[cluster(2, {own})]") == failed
    many = f"[cluster(1, {one.port})] * 17"
    assert link(many) == ["LLM_CLUSTER_NUM_EXCEED_LIMIT"] * 18
    unlink = "datadist.unlink_clusters([cluster({}, 1)])[0].name"
    assert two(unlink.format(1)) == "LLM_SUCCESS"
    assert two(unlink.format(1)) == "LLM_NOT_YET_LINK"
    assert one(unlink.format(2)) == "LLM_NOT_YET_LINK"  # it was told
    assert two(f"datadist.unlink_clusters({many})[0].name") == "LLM_CLUSTER_NUM_EXCEED_LIMIT"


@pytest.fixture
def listeners():
    """Clusters 1 and 2, which both listen; neither has linked the other."""
    first, other = free_port(), free_port()
    with (
        second(1, listen_ip_info=f"127.0.0.1:{first}") as one,
        second(2, listen_ip_info=f"127.0.0.1:{other}") as two,
    ):
        one.link = f"datadist.link_clusters([cluster(2, {other})])[0].name"
        two.link = f"datadist.link_clusters([cluster(1, {first})])[0].name"
        yield one, two


def test_both_sides_may_link_each_other(listeners):
    one, two = listeners
    assert two(two.link) == "LLM_SUCCESS"
    assert one(one.link) == "LLM_SUCCESS"
    assert two(two.link) == one(one.link) == "LLM_ALREADY_LINK"
    make(one, "[CacheKey(1, 1)]")
    make(two, "[CacheKey(2, 2)]")
    assert two.status("manager.pull_cache(CacheKey(1, 1), cache)") == "LLM_SUCCESS"
    assert one.status("manager.pull_cache(CacheKey(2, 2), cache)") == "LLM_SUCCESS"
    assert one("datadist.unlink_clusters([cluster(2, 1)])[0].name") == "LLM_SUCCESS"
    assert two.status("manager.pull_cache(CacheKey(1, 1), cache)") == "LLM_NOT_YET_LINK"
    assert one(one.link) == two(two.link) == "LLM_SUCCESS"


def test_both_sides_link_each_other_concurrently(listeners):
    one, two = listeners
    make_blocks(one, key=1)
    make_blocks(two, key=2)
    pull = "manager.pull_blocks(BlocksCacheKey({}), blocks, [1], [0])"
    for _ in range(20):
        for cluster in (one, two):
            cluster.tell(cluster.link, is_expression=True)
        assert [each.answer().get("value") for each in (one, two)] == ["LLM_SUCCESS"] * 2
        assert two.status(pull.format(1)) == "LLM_SUCCESS"
        assert one.status(pull.format(2)) == "LLM_SUCCESS"
        assert one("datadist.unlink_clusters([cluster(2, 1)])[0].name") == "LLM_SUCCESS"
        wait_until(lambda: two("1 not in datadist._links._peers"))


def test_forced_unlink_is_one_sided(pair):
    one, two = pair
    make(one)
    assert two("datadist.unlink_clusters([cluster(1, 1)], force=True)[0].name") == "LLM_SUCCESS"
    wait_until(lambda: not one("datadist._links._peers[2].is_linked"))
    assert one.status("manager.pull_cache(CacheKey(2, 1), cache)") == "LLM_LINK_FAILED"
    for _ in range(2):  # the second time there is nothing left to end
        assert one("datadist.unlink_clusters([cluster(2, 1)], force=True)[0].name") == "LLM_SUCCESS"
    assert two(f"datadist.link_clusters([cluster(1, {one.port})])[0].name") == "LLM_SUCCESS"


def test_unlink_from_a_stopped_peer_reports_failure(pair):
    one, two = pair
    one.stop()
    said = two("datadist.unlink_clusters([cluster(1, 1)], 200)[0].name")
    assert said == "LLM_NOTIFY_PROMPT_UNLINK_FAILED"
    one.go_on()
    assert two("datadist.unlink_clusters([cluster(1, 1)])[0].name") == "LLM_NOT_YET_LINK"


def test_more_than_512_links_are_refused(pair):
    _, two = pair
    two.run("from kvelastic.datadist import links; links.MOST_LINKS = 1")
    said = two("datadist.link_clusters([cluster(5, 1)])[0].name")
    assert said == "LLM_CLUSTER_NUM_EXCEED_LIMIT"


# ------------------------------------------------------------------------------------------ groups

TABLE = (
    '{"version": "1.2", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device":'
    ' [{"rank_id": "0"}, {"rank_id": "1"}, {"rank_id": "2"}]}]}'
)
STATUS = "datadist.query_register_mem_status(group).name"


def wait_for_group_status(cluster: Cluster) -> str:
    """What becomes of a group that is being prepared."""
    wait_until(lambda: cluster(STATUS) != "PREPARING")
    return cluster(STATUS)


def test_group_of_three_links_every_pair():
    with second(1) as one, second(2) as two, second(3) as three:
        members = {1: 0, 2: 1, 3: 2}
        for cluster in (three, one):
            cluster.run(f"group = datadist.link('g', {members}, '{TABLE}')")
        assert one(STATUS) == "PREPARING"
        assert one.status(f"datadist.link('g', {members}, '{TABLE}')") == "LLM_ALREADY_LINK"
        two.run(f"group = datadist.link('g', {members}, '{TABLE}')")
        for cluster in (one, two, three):
            assert wait_for_group_status(cluster) == "OK"
            make_blocks(cluster, key=cluster.cluster_id)
        for cluster in (one, two, three):
            other = cluster.cluster_id % 3 + 1
            cluster.run(f"manager.pull_blocks(BlocksCacheKey({other}), blocks, [3], [4])")
            assert row(cluster, 4, "blocks") == [3, 19, 35, 51]
        for cluster in (one, two, three):
            cluster.run("datadist.unlink(group)")
            assert cluster.status(STATUS) == "LLM_NOT_YET_LINK"
            assert cluster.status("datadist.unlink(group)") == "LLM_NOT_YET_LINK"


def test_group_with_missing_member_fails():
    with second(1, link_total_time=1) as one:
        table = TABLE.replace(', {"rank_id": "2"}', "")
        one.run(f"group = datadist.link('g', {{1: 1, 2: 0}}, '{table}')")
        assert wait_for_group_status(one) == "FAILED"
        one.run("datadist.unlink(group)")
        apart = table.replace("}, {", '}]}, {"server_id": "10.0.0.2", "device": [{')
        said = one.status(f"datadist.link('g', {{1: 1, 2: 0}}, '{apart}')")
        assert said == "LLM_FEATURE_NOT_ENABLED"


# -------------------------------------------------------------------------------------------- role


def test_switch_role_of_the_second_generation():
    first, other = free_port(), free_port()
    with (
        second(1, listen_ip_info=f"127.0.0.1:{first}", enable_switch_role=True) as one,
        second(2) as two,
    ):
        link = "datadist.link_clusters([cluster(1, {})])[0].name"
        switch = "datadist.switch_role(LLMRole.{}, {})"
        there = f'{{"llm.listenIpInfo": "127.0.0.1:{other}"}}'
        assert two(link.format(first)) == "LLM_SUCCESS"
        assert one.status(switch.format("DECODER", None)) == "LLM_EXIST_LINK"
        assert two.status(switch.format("DECODER", None)) == "LLM_EXIST_LINK"
        two.run("datadist.unlink_clusters([cluster(1, 1)])")
        two.run(switch.format("DECODER", None))  # enable_switch_role is the first generation's
        one.run(switch.format("DECODER", there))
        assert two(link.format(first)) == "LLM_LINK_FAILED"
        assert two(link.format(other)) == "LLM_SUCCESS"
        make(one, "[CacheKey(1, 1)]")
        make(two)
        assert two.status("manager.pull_cache(CacheKey(1, 1), cache)") == "LLM_SUCCESS"
        two.run("datadist.unlink_clusters([cluster(1, 1)])")
        one.run(switch.format("PROMPT", None))  # a client from now on
        assert two(link.format(other)) == "LLM_LINK_FAILED"
        with second(3, listen_ip_info=f"127.0.0.1:{first}"):
            taken = there.replace(str(other), str(first))
            assert one.status(switch.format("MIX", taken)) == "LLM_FAILED"


def test_clusters_can_listen_on_any_free_port():
    with (
        second(1, listen_ip_info="127.0.0.1:0"),
        second(2, listen_ip_info="127.0.0.1:0"),
    ):
        pass


def test_refused_switch_role_changes_nothing():
    """Types, values, two addresses at once: what was listened at is listened at after each."""
    at = free_port()
    with (
        second(1, listen_ip_info=f"127.0.0.1:{at}", enable_switch_role=True) as one,
        second(2) as two,
    ):
        one.run(
            "def switch(*arguments):\n"
            "    try:\n        datadist.switch_role(*arguments)\n"
            "    except (TypeError, ValueError) as error:\n"
            "        return [isinstance(error, TypeError), isinstance(error, LLMException)]"
        )
        wrong_types = ("1", "None", "'PROMPT'", "LLMRole.MIX, 1", "LLMRole.MIX, ['x']")
        for arguments in (*wrong_types, "LLMRole.MIX, {'llm.listenIpInfo': 1}"):
            assert one(f"switch({arguments})") == [True, False], arguments
        for place in ("nowhere", "127.0.0.1", "127.0.0.1:70000", "1.1.1.1:1;1.1.1.2:2"):
            options = {"llm.listenIpInfo": place}
            assert one(f"switch(LLMRole.MIX, {options})") == [False, True], place
        assert one("datadist._role.name") == "MIX"
        assert two(f"datadist.link_clusters([cluster(1, {at})])[0].name") == "LLM_SUCCESS"


def test_forbidden_address_leaves_the_old_one(tmp_path):
    """Beyond the loopback interface, which needs KVELASTIC_LINK_ALLOW."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 64)
    environment = {"KVELASTIC_LINK_SECRET": str(secret)}
    at = free_port()
    with (
        second(1, environment=environment, listen_ip_info=f"127.0.0.1:{at}") as one,
        second(2, environment=environment) as two,
    ):
        options = {"llm.listenIpInfo": f"0.0.0.0:{free_port()}"}
        said = one.status(f"datadist.switch_role(LLMRole.DECODER, {options})")
        assert said == "LLM_PARAM_INVALID"
        roles = "datadist._role.name, datadist._links._role.name"
        assert one(f"[{roles}]") == ["MIX", "MIX"]
        assert two(f"datadist.link_clusters([cluster(1, {at})])[0].name") == "LLM_SUCCESS"


def test_first_generation_links_and_pulls():
    at = free_port()
    with (
        Cluster(1, "PROMPT", listen_ip_info=f"127.0.0.1:{at}", enable_switch_role=True) as prompt,
        Cluster(2, "DECODER", enable_switch_role=True) as decoder,
    ):
        assert decoder.status("datadist.check_link_status(1)") == "LLM_NOT_YET_LINK"
        assert prompt(f"datadist.link_clusters([cluster(2, {at})])[0].name") == "LLM_PARAM_INVALID"
        assert decoder(f"datadist.link_clusters([cluster(1, {at})])[0].name") == "LLM_SUCCESS"
        assert decoder.status("datadist.check_link_status(1)") == "LLM_SUCCESS"
        assert prompt.status("datadist.check_link_status(2)") == "LLM_PARAM_INVALID"
        for name in ("cache_manager", "link('a', {}, '')", "unlink(1)"):
            assert decoder.status(f"datadist.{name}") == "LLM_PARAM_INVALID"
        make(prompt, "[CacheKey(1, 7), CacheKey(1, 8)]")
        make(decoder, fill=False)
        offsets = "src_cache_offset=4, dst_cache_offset=2"
        decoder.run(f"manager.pull_cache(CacheKey(1, 8), cache, 0, 8, {offsets})")
        assert decoder("read(cache, 1, 0, 11)") == [0, 0, *[17] * 8, 0]
        addrs = decoder("cache.per_device_tensor_addrs[0]")
        prompt.run("steps = Events(2); [event.set() for event in steps.events]")
        prompt.run(
            f"task = manager.transfer_cache_async(cache, steps, [TransferConfig(2, {addrs})])"
        )
        assert prompt("task.synchronize().name") == "LLM_SUCCESS"
        assert row(decoder, 0) == [0, 16, 32, 48]
        busy = "with datadist._links._peer(1).used(is_layered=False): datadist.check_link_status(1)"
        assert decoder.status(busy) == "LLM_LINK_BUSY"
        switch = "datadist.switch_role(LLMRole.{}, {})"
        assert decoder.status(switch.format("DECODER", None)) == "LLM_PARAM_INVALID"
        assert decoder.status(switch.format("PROMPT", None)) == "LLM_PARAM_INVALID"
        assert decoder.status(switch.format("MIX", None)) == "LLM_EXIST_LINK"
        prompt.stop()
        with decoder.wait_at_most(0.2):
            assert decoder.status("datadist.check_link_status(1)") == "LLM_TIMEOUT"
            assert decoder.status("datadist.check_link_status(1)") == "LLM_WAIT_PROCESS_TIMEOUT"
        prompt.go_on()


def test_each_device_pulls_from_its_counterpart():
    at = free_port()
    with (
        Cluster(1, "PROMPT", listen_ip_info=f"127.0.0.1:{at}", device_id=[0, 1]) as prompt,
        Cluster(2, "DECODER", device_id=[0, 1], enable_switch_role=True) as decoder,
    ):
        decoder.run(f"datadist.link_clusters([cluster(1, {at})])")
        make(prompt, "[CacheKey(1, 7)]")
        make(decoder, fill=False)
        decoder.run("manager.pull_cache(CacheKey(1, 7), cache)")
        assert row(decoder, 0) == [0, 16, 32, 48]
        assert decoder.status("datadist.switch_role(LLMRole.MIX)") == "LLM_PARAM_INVALID"
        send = "manager.transfer_cache_async(cache, Events(2), [TransferConfig(2, [16] * 4)])"
        assert prompt.status(send) == "LLM_PARAM_INVALID"
