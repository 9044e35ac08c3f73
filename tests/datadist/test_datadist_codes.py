"""Every status code: provoked through the interface's calls, or stated to be impossible.

`test_every_status_code_is_provoked_or_excluded` visits the whole enumeration. So a new code fails
it until a test here provokes the code, or `CANNOT_OCCUR` and docs/datadist.md exclude it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datadist_cluster import Cluster
from ports import free_port
from waiting import wait_until

from kvelastic.datadist import LLMStatusCode

DOCUMENT = Path(__file__).parents[2] / "docs/datadist.md"

CANNOT_OCCUR = {
    "LLM_REPEAT_REQUEST": "no call is a request with an id that could come twice",
    "LLM_REQUEST_ALREADY_COMPLETED": "the same",
    "LLM_UNLINK_FAILED": "this side of a link always ends",
    "LLM_SEQ_LENOVERLIMIT": "no call names the length of a sequence",
    "LLM_NO_FREE_BLOCK": "no call takes blocks out of a blocks cache",
    "LLM_BLOCKS_OUT_OF_MEMORY": "a blocks cache has the memory of all of its blocks",
    "LLM_DEVICE_MEM_ERROR": "there is no Ascend device",
    "LLM_SUSPECT_REMOTE_ERROR": "the same",
}


class Pair:
    """Cluster 1 listens, cluster 2 has linked it; both of the second generation."""

    def __init__(self, one: Cluster, two: Cluster, port: int) -> None:
        self.one, self.two, self.port = one, two, port

    def link(self) -> str:
        return self.two(f"datadist.link_clusters([cluster(1, {self.port})])[0].name")

    def linked(self) -> Cluster:
        assert self.link() in {"LLM_SUCCESS", "LLM_ALREADY_LINK"}
        return self.two


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    port = free_port()
    pool = '{"memory_size": 33554432}'
    config: dict[str, Any] = {"enable_cache_manager": True, "mem_pool_cfg": pool}
    with (
        Cluster(1, listen_ip_info=f"127.0.0.1:{port}", enable_switch_role=True, **config) as one,
        Cluster(2, **config) as two,
    ):
        for cluster in (one, two):
            cluster.run("row = CacheDesc(1, [1, 64], DataType.DT_INT8)")
            cluster.run("cache = manager.allocate_cache(row)")
        yield Pair(one, two, port)


PROVOKED: dict[str, Callable[[Pair], str]] = {}


def provokes(name: str) -> Callable[[Callable[[Pair], str]], Callable[[Pair], str]]:
    def keep(provoke: Callable[[Pair], str]) -> Callable[[Pair], str]:
        PROVOKED[name] = provoke
        return provoke

    return keep


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in LLMStatusCode])
def test_every_status_code_is_provoked_or_excluded(name: str, pair: Pair) -> None:
    if name in CANNOT_OCCUR:
        assert name not in PROVOKED
        return
    assert name in PROVOKED, "no test provokes it: write one, or say why it cannot occur"
    assert PROVOKED[name](pair) == name


def test_the_documentation_has_the_same_codes() -> None:
    _, _, codes = DOCUMENT.read_text().partition("## Codes")
    codes, _, _ = codes.partition("\n## ")
    table = "".join(line for line in codes.splitlines(keepends=True) if line.startswith("|"))
    rest = codes.replace(table, "")
    assert set(re.findall(r"`(LLM_[A-Z_]+)`", table)) == PROVOKED.keys() - {"LLM_SUCCESS"}
    listed = "".join(line for line in rest.splitlines() if line.startswith("- "))
    assert set(re.findall(r"`(LLM_[A-Z_]+)`", listed)) == CANNOT_OCCUR.keys()


def test_excluded_codes_are_unused_in_the_package() -> None:
    package = DOCUMENT.parents[1] / "kvelastic/datadist"
    for path in package.glob("*.py"):
        if path.name != "status.py":
            said = set(re.findall(r"LLM_[A-Z_]+", path.read_text()))
            assert not said & CANNOT_OCCUR.keys(), path


# --- in one process


@provokes("LLM_SUCCESS")
def _(pair: Pair) -> str:
    return pair.one.status("manager.deallocate_cache(manager.allocate_cache(row))")


@provokes("LLM_FAILED")
def _(pair: Pair) -> str:
    with Cluster(3, enable_cache_manager=True) as other:
        other.run(
            f"config.listen_ip_info = '127.0.0.1:{pair.port}'; datadist.finalize()\n"
            "datadist = LLMDataDist(LLMRole.MIX, 3)"
        )
        taken = other.status("datadist.init(config.generate_options())")
    assert taken == "LLM_FAILED"
    return pair.one.status("LLMDataDist(LLMRole.MIX, 9).init(config.generate_options())")


@provokes("LLM_PARAM_INVALID")
def _(pair: Pair) -> str:
    return pair.one.status("manager.copy_cache(cache, cache, 1)")


@provokes("LLM_FEATURE_NOT_ENABLED")
def _(pair: Pair) -> str:
    return pair.one.status("manager.push_cache(CacheKeyByIdAndIndex(2, 1), cache)")


@provokes("LLM_OUT_OF_MEMORY")
def _(pair: Pair) -> str:
    return pair.one.status("manager.allocate_cache(CacheDesc(1, [1 << 30], DataType.DT_INT8))")


@provokes("LLM_PREFIX_ALREADY_EXIST")
def _(pair: Pair) -> str:
    pair.one.run("prefix = [CacheKey(1, 2**64 - 1, prefix_id=1)]")
    pair.one.run("kept = manager.allocate_cache(row, prefix)")
    return pair.one.status("manager.allocate_cache(row, prefix)")


@provokes("LLM_DEVICE_OUT_OF_MEMORY")
def _(_: Pair) -> str:
    options = {"ge.flowGraphMemMaxSize": "4194304"}
    with Cluster(3, "DECODER", ge_options=options) as first:
        return first.status("manager.allocate_cache(CacheDesc(1, [1 << 30], DataType.DT_INT8))")


@provokes("LLM_ENGINE_FINALIZED")
def _(_: Pair) -> str:
    with Cluster(3, enable_cache_manager=True) as ended:
        ended.run("datadist.finalize()")
        return ended.status("manager.allocate_cache(CacheDesc(1, [1], DataType.DT_INT8))")


# --- links


@provokes("LLM_NOT_YET_LINK")
def _(pair: Pair) -> str:
    return pair.two.status("manager.pull_cache(CacheKey(77, 1), cache)")


@provokes("LLM_ALREADY_LINK")
def _(pair: Pair) -> str:
    pair.linked()
    return pair.link()


@provokes("LLM_LINK_FAILED")
def _(pair: Pair) -> str:
    return pair.two(f"datadist.link_clusters([cluster(9, {free_port()})])[0].name")


@provokes("LLM_CLUSTER_NUM_EXCEED_LIMIT")
def _(pair: Pair) -> str:
    return pair.two("datadist.link_clusters([cluster(9, 1)] * 17)[0].name")


@provokes("LLM_EXIST_LINK")
def _(pair: Pair) -> str:
    pair.linked()
    return pair.one.status("datadist.switch_role(LLMRole.PROMPT)")


@provokes("LLM_PROCESSING_LINK")
def _(pair: Pair) -> str:
    """Another thread waits for a peer that is stopped."""
    pair.linked().run("datadist.unlink_clusters([cluster(1, 1)])")
    pair.one.stop()
    try:
        pair.two.run(
            f"said = []; info = cluster(1, {pair.port})\n"
            "link = lambda: said.append(datadist.link_clusters([info])[0].name)\n"
            "other = threading.Thread(target=link); other.start()"
        )
        wait_until(lambda: pair.two("1 in datadist._links._in_progress"))
        found = pair.link()
    finally:
        pair.one.go_on()
    pair.two.run("other.join()")
    assert pair.two("said") == ["LLM_SUCCESS"]
    return found


@provokes("LLM_NOTIFY_PROMPT_UNLINK_FAILED")
def _(pair: Pair) -> str:
    two = pair.linked()
    pair.one.stop()
    try:
        return two("datadist.unlink_clusters([cluster(1, 1)], 200)[0].name")
    finally:
        pair.one.go_on()


@provokes("LLM_LINK_BUSY")
def _(pair: Pair) -> str:
    """A layered transfer waits for its first layer's push; nothing else may use the link."""
    two = pair.linked()
    return two.status(
        "with datadist._links._peer(1).used(is_layered=True):"
        " manager.pull_cache(CacheKey(1, 1), cache)"
    )


# --- transfers


@provokes("LLM_KV_CACHE_NOT_EXIST")
def _(pair: Pair) -> str:
    return pair.linked().status("manager.pull_cache(CacheKey(1, 404), cache)")


@provokes("LLM_PREFIX_NOT_EXIST")
def _(pair: Pair) -> str:
    pull = "manager.pull_cache(CacheKey(1, 2**64 - 1, prefix_id=404), cache)"
    return pair.linked().status(pull)


def pull_from_stopped_peer(pair: Pair) -> list[str]:
    two = pair.linked()
    pair.one.stop()
    try:
        with two.wait_at_most(0.2):
            return [two.status("manager.pull_cache(CacheKey(1, 1), cache)") for _ in range(2)]
    finally:
        pair.one.go_on()


@provokes("LLM_TIMEOUT")
def _(pair: Pair) -> str:
    return pull_from_stopped_peer(pair)[0]


@provokes("LLM_WAIT_PROCESS_TIMEOUT")
def _(pair: Pair) -> str:
    return pull_from_stopped_peer(pair)[1]


def status_of_pull_refused_with(pair: Pair, number: int) -> str:
    """What a pull comes to that the peer refuses with this number."""
    two = pair.linked()
    pair.one.run(
        "from kvelastic.datadist import wire; answered = datadist._links._answered\n"
        f"datadist._links._answered = lambda link, asked: wire.Refused({number}, 'no')"
    )
    try:
        return two.status("manager.pull_cache(CacheKey(1, 1), cache)")
    finally:
        pair.one.run("datadist._links._answered = answered")


@provokes("LLM_UNKNOWN_ERROR")
def _(pair: Pair) -> str:
    """A peer of a later version has a number that this one does not know."""
    return status_of_pull_refused_with(pair, 0x5010B000 + 99)


def test_peer_refusal_with_code_0_is_an_error(pair: Pair) -> None:
    assert status_of_pull_refused_with(pair, 0) == "LLM_UNKNOWN_ERROR"
