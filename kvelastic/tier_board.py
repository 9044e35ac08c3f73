"""Tier boards from outside: read what an instance says of its tiers, and ask something of it.

    board = read(inspect("kvelastic_vLLM_4711"))        # None: it has no tiers
    answer = ask(info, TierRequest("limit", tier="disk", size_bytes=1 << 30), wait_s=5.0)

A board is a file beside the segment in /dev/shm, called after the segment's uuid, so that none is
ever taken for that of another instance of the same name. It goes with its instance: by itself at
the end, or by `segment.reap` when its process is dead. It is read with pread(), never mapped: who
may write to it may also shorten it, and a mapping would be a SIGBUS then.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvelastic import tier_board_format as board_format
from kvelastic.errors import (
    InvalidArgumentError,
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.lease import MAKER_BYTE, Liveness, liveness
from kvelastic.segment_dir import (
    LOCK_WAIT_S,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    SegmentInfo,
    board_name,
    locked,
    open_file,
)
from kvelastic.tier_board_format import BoardFigures, TierAnswer, TierRequest

_READ_TRIES: Final = 100
POLL_S: Final = 0.01
"""Between two looks for an answer."""
_DEATH_CHECK_S: Final = 0.25
_OTHERS: Final = 0o077


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
    deadline_s = time.monotonic() + wait_s
    with post(info, request) as asked:
        while True:
            answer, now_s = asked.look(), time.monotonic()
            if answer is not None or asked.is_lost or now_s >= deadline_s:
                return answer
            time.sleep(min(POLL_S, deadline_s - now_s))


def post(info: SegmentInfo, request: TierRequest) -> Asked:
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
        _check_alive(fd, info.name, "nothing was asked")
        tiers = [one.tier for one in _newest(fd, info.name).tiers]
        if request.tier and request.tier not in tiers:
            raise InvalidArgumentError(
                f"the instance {info.name!r} has no tier {request.tier!r}; it has"
                f" {', '.join(tiers)}"
            )
        with locked(fd, info.name, LOCK_WAIT_S):
            return Asked(fd, info.name, _write(fd, info.name, request))
    except BaseException:
        os.close(fd)
        raise


class Asked:
    """A request that was written, and the place of its answer. For one thread at a time."""

    def __init__(self, fd: int, name: str, revision: int) -> None:
        self.is_lost = False
        """The answer was written over by that to a later request; there will be none."""
        self._fd = fd
        self._name = name
        self._revision = revision
        self._check_s = time.monotonic() + _DEATH_CHECK_S

    def look(self) -> TierAnswer | None:
        """The answer if there is one; never waits. Raises `SegmentDeadError` if there cannot be."""
        place = (board_format.answer_at(self._revision), board_format.CELL_BYTES)
        answer = board_format.unpack_answer(_cell(self._fd, place))
        if answer is not None and answer.revision >= self._revision:
            self.is_lost = answer.revision != self._revision
            return None if self.is_lost else answer
        if time.monotonic() >= self._check_s:
            _check_alive(self._fd, self._name, "it did not answer")
            self._check_s = time.monotonic() + _DEATH_CHECK_S
        return None

    def close(self) -> None:
        """Let go of the board. Repeatable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(info: SegmentInfo, flags: int) -> int | None:
    if not info.header:
        raise SegmentFormatError(info.problem or f"the segment {info.name!r} cannot be read")
    try:
        fd = open_file(board_name(info.header["uuid"]), flags)
    except SegmentNotFoundError:
        return None
    try:
        state = os.fstat(fd)
        if (
            state.st_uid != _owner_of(info.name)
            or state.st_nlink > 1
            or stat.S_IMODE(state.st_mode) & _OTHERS
        ):
            raise SegmentFormatError(
                f"the tier board of {info.name!r} is not a file of its user alone"
            )
        version = board_format.version_of(os.pread(fd, 16, 0))
        if version != board_format.VERSION:
            what = "no board" if version is None else f"of version {version}"
            raise SegmentFormatError(
                f"the tier board of {info.name!r} is {what}; this kvelastic reads version"
                f" {board_format.VERSION}"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _owner_of(name: str) -> int:
    """Of the segment's file: a number in it may be that of another user namespace."""
    try:
        return (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError:
        raise SegmentNotFoundError(f"no segment is called {name!r}") from None


def _newest(fd: int, name: str) -> BoardFigures:
    """The newer whole snapshot. Both are torn only while one is written and one is damaged, or when
    two were written during one look; so it looks again, and not for ever.
    """
    for _ in range(_READ_TRIES):
        found = [
            snapshot
            for number in range(board_format.SNAPSHOTS)
            if (snapshot := board_format.unpack_snapshot(_cell(fd, _snapshot_place(number))))
        ]
        if found:
            return max(found, key=lambda snapshot: snapshot[0])[1]
    raise SegmentFormatError(
        f"the tier board of {name!r} is damaged; its instance writes it again within a second"
    )


def _snapshot_place(number: int) -> tuple[int, int]:
    """Offset and size of a snapshot in the file."""
    return board_format.snapshot_at(number), board_format.SNAPSHOT_BYTES


def _cell(fd: int, place: tuple[int, int]) -> bytes:
    at, size = place
    return os.pread(fd, size, at)


def requests_in(fd: int) -> dict[int, TierRequest]:
    """Every whole request in an open board, by its revision."""
    cells = _ring(fd, board_format.request_at(0))
    found = (board_format.unpack_request(cell) for cell in cells)
    return dict(one for one in found if one is not None)


def _answers_in(fd: int) -> list[int]:
    cells = _ring(fd, board_format.answer_at(0))
    found = (board_format.unpack_answer(cell) for cell in cells)
    return [one.revision for one in found if one is not None]


def _ring(fd: int, at: int) -> list[bytes]:
    """All cells of a ring, read by one system call."""
    size = board_format.CELL_BYTES
    raw = os.pread(fd, board_format.RING * size, at)
    return [raw[place : place + size] for place in range(0, len(raw), size)]


def _write(fd: int, name: str, request: TierRequest) -> int:
    """Under the lock: what was asked before is read, and this gets the next revision."""
    answered = max(0, _newest(fd, name).answered_revision, *_answers_in(fd))
    revision = max(answered, *requests_in(fd), 0) + 1
    if revision - answered > board_format.RING:
        raise SegmentBusyError(
            f"{board_format.RING} requests to the tiers of {name!r} wait for an answer already;"
            " nothing was asked"
        )
    try:
        os.pwrite(
            fd, board_format.pack_request(revision, request), board_format.request_at(revision)
        )
    except OSError as error:
        raise SegmentError(f"cannot write to the tier board of {name!r}: {error}") from error
    return revision


def _check_alive(fd: int, name: str, consequence: str) -> None:
    if liveness(fd, MAKER_BYTE) is Liveness.DEAD or os.fstat(fd).st_nlink == 0:
        raise SegmentDeadError(f"the tiers of {name!r} have ended; {consequence}")
