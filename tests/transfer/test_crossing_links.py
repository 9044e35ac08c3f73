"""Two nodes that link each other at the same time, and a peer that uses a link at once."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from linked import address_of
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import LinkExistsError
from kvelastic.transfer import Link, Node


def echo(_: Link, body: bytes) -> bytes:
    return body


@pytest.mark.parametrize("ids", [(1, 2), (2, 1)])
def test_one_of_two_crossing_links_remains(tmp_path: Path, ids: tuple[int, int]) -> None:
    """Each node has seen the other's Hello before its own link stands."""
    at = [address_of("unix", tmp_path, name) for name in ("one", "other")]
    with (
        Node(ids[0], answer=echo, listen=[at[0]]) as one,
        Node(ids[1], answer=echo, listen=[at[1]]) as other,
        ThreadPoolExecutor(2) as linking,
    ):
        met = threading.Barrier(2)

        def meet(node_id: int, deadline_s: float) -> None:
            met.wait(DEADLINE_S)

        one._look_after = other._look_after = meet  # type: ignore[method-assign]
        links = [
            linking.submit(one.link, at[1], DEADLINE_S),
            linking.submit(other.link, at[0], DEADLINE_S),
        ]
        failed = [made.exception(DEADLINE_S) for made in links]
        assert [type(error) for error in failed if error] == [LinkExistsError]
        lower = ids.index(1)
        assert failed[lower] is None  # that of the lower id stands

        def is_one() -> bool:
            return len(one.links) == len(other.links) == 1

        wait_until(is_one, "there is not one link")
        for node in (one, other):
            (link,) = node.links
            assert link.is_client is (node.node_id == 1)
            assert link.ask(b"there?", DEADLINE_S) == b"there?"
            link.check(DEADLINE_S)
        assert is_one()


def test_peer_may_call_before_the_link_is_returned(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    asked: list[Future[bytes]] = []
    with ThreadPoolExecutor(1) as asking:

        def ask(link: Link) -> None:
            asked.append(asking.submit(link.ask, b"there?", DEADLINE_S))

        with Node(1, listen=[address], on_link=ask) as owner, Node(2, answer=echo) as reader:

            def late(node_id: int, deadline_s: float) -> None:
                wait_until(lambda: asked and owner.links[0].connection._waiting)

            reader._look_after = late  # type: ignore[method-assign]
            reader.link(address, DEADLINE_S)
            assert asked[0].result(DEADLINE_S) == b"there?"
