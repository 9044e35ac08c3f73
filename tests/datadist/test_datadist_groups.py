"""Groups of clusters over stand-ins of links: links end with their group, and every wait ends."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_until

from kvelastic.datadist import LLMException, LLMStatusCode
from kvelastic.datadist.enums import RegisterMemStatus
from kvelastic.datadist.group_links import Group, GroupLinks, Joined
from kvelastic.datadist.status import failure


def group_of(*others: int) -> Group:
    """Cluster 9, behind the others in rank."""
    return Group("g", 9, {one: rank for rank, one in enumerate((*others, 9))}, [])


class Left(list[int]):
    """Clusters that were unlinked; `refused` cannot be."""

    refused: int | None = None

    def leave(self, cluster_id: int) -> None:
        if cluster_id == self.refused:
            raise failure(LLMStatusCode.LLM_LINK_BUSY, "busy")
        self.append(cluster_id)


def ended(links: GroupLinks, comm_id: int) -> RegisterMemStatus:
    wait_until(lambda: links.status(comm_id) is not RegisterMemStatus.PREPARING)
    return links.status(comm_id)


def test_links_of_a_failed_group_end_with_it() -> None:
    left = Left()
    links = GroupLinks(lambda one, *_: Joined(is_new_link=one == 1, is_member=False), left.leave)
    comm_id = links.begin(group_of(1, 2), 0.01, 1)
    assert ended(links, comm_id) is RegisterMemStatus.FAILED
    links.end(comm_id)
    assert left == [1], "the link to 2 was there before the group"


def test_link_made_while_its_group_ends_is_unlinked() -> None:
    left = Left()
    linking, goes_on = threading.Event(), threading.Event()

    def join(*_: object) -> Joined:
        linking.set()
        goes_on.wait()
        return Joined(is_new_link=True, is_member=True)

    links = GroupLinks(join, left.leave)
    comm_id = links.begin(group_of(1), 100, 1)
    linking.wait()
    links.end(comm_id)
    assert left == []
    goes_on.set()
    wait_until(lambda: left == [1])


def test_all_other_members_are_unlinked_despite_an_error() -> None:
    left = Left()
    left.refused = 1
    links = GroupLinks(lambda *_: Joined(is_new_link=True, is_member=True), left.leave)
    comm_id = links.begin(group_of(1, 2, 3), 100, 1)
    assert ended(links, comm_id) is RegisterMemStatus.OK
    with pytest.raises(LLMException, match="busy"):
        links.end(comm_id)
    assert left == [2, 3]


def test_group_without_a_thread_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    links = GroupLinks(lambda *_: Joined(is_new_link=True, is_member=True), lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LLMException, match="can't start") as raised:
            links.begin(group_of(1), 100, 1)
    assert raised.value.status_code is LLMStatusCode.LLM_FAILED
    assert ended(links, links.begin(group_of(1), 100, 1)) is RegisterMemStatus.OK
