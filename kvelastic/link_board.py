"""Link boards from outside: read what nodes say of their links, and ask one to cut a link.

    for node in nodes(): print(node.node_id, [link.peer_id for link in node.links])
    answer = cut(node, link, wait_s=2.0)

A node is a process that others copy from and to (`kvelastic.transfer`). It need not be an instance,
so its board (`board_file`) is called after 16 random bytes, and found by its name's beginning.
"""

from __future__ import annotations

import os

from kvelastic import board_file
from kvelastic import link_board_format as board_format
from kvelastic.board_file import Asked, check_alive, newest, open_board
from kvelastic.errors import (
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.lease import MAKER_BYTE, Liveness, liveness
from kvelastic.link_board_format import (
    LAYOUT,
    LinkAnswer,
    LinkFigures,
    LinkRequest,
    NodeFigures,
)
from kvelastic.segment_dir import (
    LINK_BOARD,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
)


def nodes() -> list[NodeFigures]:
    """All nodes whose boards this user may read, by id and process; dead ones are left out.

    One that cannot be read is left out, too (`look` says so). Raises `SegmentError` where this
    process is out of file descriptors: none would look as if there were none.
    """
    return look()[0]


def look() -> tuple[list[NodeFigures], list[str]]:
    """As `nodes`; and what is wrong with boards that cannot be read: another version, damage."""
    looks = [_look_at(name) for name in _names()]
    found = [figures for figures in looks if isinstance(figures, NodeFigures)]
    problems = [problem for problem in looks if isinstance(problem, str)]
    return sorted(found, key=lambda node: (node.node_id, node.pid)), sorted(problems)


def _look_at(name: str) -> NodeFigures | str | None:
    try:
        return _read(name)
    except SegmentFormatError as error:
        return f"{SHM_DIR / name}: {error}"


def cut(node: NodeFigures, link: LinkFigures, wait_s: float) -> LinkAnswer | None:
    """Have a node end one of its links, at once and on both sides; transfers over it fail.

    Its users see a peer that has gone, and may link anew. None: no answer within `wait_s`; the
    request stays. Raises `SegmentNotFoundError` where the node has gone, `SegmentBusyError`,
    `SegmentDeadError`, `SegmentError`. Blocks.
    """
    request = LinkRequest("cut", link.number, link.peer_id)
    for name in _names():
        if _is_of(name, node):
            with _post(name, request) as asked:
                return asked.wait(wait_s)
    raise SegmentNotFoundError(f"node {node.node_id} of process {node.pid} has gone")


def _post(name: str, request: LinkRequest) -> Asked[LinkAnswer]:
    fd = _open(name, WRITE_FLAGS)
    if fd is None:
        raise SegmentNotFoundError("the node has gone")
    try:
        check_alive(fd, "links of the node", "nothing was asked")
        return board_file.post(
            fd,
            LAYOUT,
            lambda revision: board_format.pack_request(revision, request),
            board_format.unpack_request,
            board_format.unpack_answer,
            answered=lambda: _newest(fd).answered_revision,
            lock_name=name,
            subject="links of the node",
        )
    except BaseException:
        os.close(fd)
        raise


def _is_of(name: str, node: NodeFigures) -> bool:
    try:
        found = _read(name)
    except SegmentFormatError:
        return False
    return found is not None and (found.node_id, found.pid, found.started_realtime_ns) == (
        node.node_id,
        node.pid,
        node.started_realtime_ns,
    )


def _names() -> list[str]:
    try:
        with os.scandir(SHM_DIR) as entries:
            return [entry.name for entry in entries if LINK_BOARD.fullmatch(entry.name)]
    except OSError as error:
        if is_out_of_descriptors(error):
            raise SegmentError(f"cannot list {SHM_DIR}: {error.strerror}") from error
        return []


def _read(name: str) -> NodeFigures | None:
    """None: it is dead, or another user's. Raises `SegmentFormatError` where it cannot be read."""
    try:
        fd = _open(name, READ_FLAGS)
        if fd is None:
            return None
        try:
            if liveness(fd, MAKER_BYTE) is Liveness.DEAD:
                return None
            return _newest(fd)
        finally:
            os.close(fd)
    except SegmentError as error:
        if isinstance(error, SegmentFormatError) or is_out_of_descriptors(error):
            raise
        return None


def _newest(fd: int) -> NodeFigures:
    return newest(fd, LAYOUT, board_format.unpack_snapshot, LAYOUT.subject)


def _open(name: str, flags: int) -> int | None:
    """Of whoever's file it is, as long as it is that user's alone: root sees all."""
    try:
        owner_uid = (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError:
        return None
    return open_board(name, LAYOUT, flags, LAYOUT.subject, owner_uid)
