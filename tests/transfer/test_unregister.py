"""The end of a registration, while copies use the memory."""

from __future__ import annotations

from pathlib import Path

from linked import Memory, address_of, linked
from waiting import DEADLINE_S

from kvelastic.transfer import Hold, Node, Registered


def is_written(registered: Registered) -> bool:
    """Whether `unregister` would wait for a push now."""
    return registered._writers > 0


def test_unregister_waits_until_a_push_releases(tmp_path: Path) -> None:
    """Or the memory's owner might reuse it while its blocks are pinned."""
    theirs, ours = Memory(bytes(100)), Memory(b"x" * 100)
    at_release: list[bool] = []

    class Held:
        def is_whole(self) -> bool:
            return True

        def release(self) -> None:
            at_release.append(is_written(registered))

    def hold(pieces: bytes) -> Hold:
        return Held()

    with (
        Node(1, listen=[address_of("unix", tmp_path)]) as owner,
        Node(2) as reader,
        linked("memory", owner, reader) as link,
    ):
        registered = owner.register(theirs.address, theirs.size, hold)
        link.push([ours.piece()], [theirs.piece()], timeout_s=DEADLINE_S)
        owner.unregister(registered)
    assert theirs.content == ours.content
    assert at_release == [True]
