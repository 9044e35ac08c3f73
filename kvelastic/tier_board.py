"""Tier boards from outside: read what an instance says of its tiers, and ask something of it.

    board = read(inspect("kvelastic_vLLM_4711"))        # None: it has no tiers
    answer = ask(info, TierRequest("limit", tier="disk", size_bytes=1 << 30), wait_s=5.0)

A board is a file beside the segment in /dev/shm (`board_file`), called after the segment's uuid, so
that none is ever taken for that of another instance of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvelastic import board_file
from kvelastic import tier_board_format as board_format
from kvelastic.board_file import Asked, check_alive, newest, open_board
from kvelastic.errors import (
    InvalidArgumentError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.segment_dir import (
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    SegmentInfo,
    board_name,
)
from kvelastic.tier_board_format import LAYOUT, BoardFigures, TierAnswer, TierRequest


def read(info: SegmentInfo) -> BoardFigures | None:
    """What a live instance says of its tiers; None where it has none.

    Waits for nobody. Raises `SegmentFormatError` for a board of another version, of somebody else,
    or damaged; `SegmentError` if it cannot be opened.
    """
    fd = _open(info, READ_FLAGS)
    if fd is None:
        return None
    try:
        return _newest(fd, info.name)
    finally:
        os.close(fd)


def boards_of(infos: Sequence[SegmentInfo]) -> Mapping[str, BoardFigures]:
    """The boards of those that have one that can be read, by the names of their segments."""
    boards = {}
    for info in infos:
        if info.is_alive and info.header:
            with suppress(SegmentError):
                board = read(info)
                if board is not None:
                    boards[info.name] = board
    return boards


def ask(info: SegmentInfo, request: TierRequest, wait_s: float) -> TierAnswer | None:
    """Ask something of an instance's tiers, and wait for its answer to this very request.

    None: no answer within `wait_s`; the request stays, and the instance goes on. Raises as `post`,
    and `SegmentDeadError` if it ends meanwhile.
    """
    with post(info, request) as asked:
        return asked.wait(wait_s)


def post(info: SegmentInfo, request: TierRequest) -> Asked[TierAnswer]:
    """Ask the same, and leave the waiting to the caller, who closes what is returned.

    Blocks for milliseconds: operators share a lock. Raises `InvalidArgumentError` for a malformed
    request and for a tier that it does not have, `SegmentNotFoundError` where it has no tiers,
    `SegmentBusyError` where others have asked as much as there is room for, `SegmentDeadError` if
    it has ended, and as `read`.
    """
    try:
        board_format.check_request(request)
    except board_format.BadRequestError as error:
        raise InvalidArgumentError(f"{error}; nothing was asked") from None
    fd = _open(info, WRITE_FLAGS)
    if fd is None:
        raise SegmentNotFoundError(
            f"the instance {info.name!r} has no tiers; it gets them from KVELASTIC_TIERS when it"
            " starts"
        )
    try:
        check_alive(fd, f"tiers of {info.name!r}", "nothing was asked")
        tiers = [one.tier for one in _newest(fd, info.name).tiers]
        if request.tier and request.tier not in tiers:
            raise InvalidArgumentError(
                f"the instance {info.name!r} has no tier {request.tier!r}; it has"
                f" {', '.join(tiers)}"
            )
        return board_file.post(
            fd,
            LAYOUT,
            lambda revision: board_format.pack_request(revision, request),
            board_format.unpack_request,
            board_format.unpack_answer,
            answered=lambda: _newest(fd, info.name).answered_revision,
            lock_name=info.name,
            subject=f"tiers of {info.name!r}",
        )
    except BaseException:
        os.close(fd)
        raise


def _open(info: SegmentInfo, flags: int) -> int | None:
    if not info.header:
        raise SegmentFormatError(info.problem or f"the segment {info.name!r} cannot be read")
    name = board_name(info.header["uuid"])
    return open_board(name, LAYOUT, flags, f"tier board of {info.name!r}", _owner_of(info.name))


def _owner_of(name: str) -> int:
    """Of the segment's file: a number in it may be that of another user namespace."""
    try:
        return (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError:
        raise SegmentNotFoundError(f"no segment is called {name!r}") from None


def _newest(fd: int, name: str) -> BoardFigures:
    return newest(fd, LAYOUT, board_format.unpack_snapshot, f"tier board of {name!r}")
