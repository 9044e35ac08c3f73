"""The instance's end of its tier board: the file in /dev/shm, its snapshots and its answers.

    board = Board.create(uuid)
    board.publish(figures)
    revision, request = board.next_request()       # None: nothing new
    board.answer(TierAnswer(revision, "done", (12,), ""))
    board.close()                                  # removes the file

A process that ends without closing leaves the file to `segment_dir.reap`, as its segment. Any
thread may call any method. The native latch of segments is not used. It orders the words of a
mapping for readers that share it; this is written twice a second, and read with pread() because a
mapping of a file that somebody shortens is a SIGBUS. A checksum for each cell says all that is
needed, and says it of damage, too.
"""

from __future__ import annotations

import threading

from kvelastic import tier_board_format as board_format
from kvelastic.board_file import BoardFile
from kvelastic.segment_dir import board_name
from kvelastic.tier_board_format import LAYOUT, BoardFigures, TierAnswer, TierRequest


class Board:
    """See the module. Made by `create`."""

    def __init__(self, file: BoardFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        """Guards what is below, and the file against its own threads."""
        self._answered = 0

    @staticmethod
    def create(uuid: bytes) -> Board:
        """Make the board of the instance whose segment has this uuid.

        Raises `SegmentError` if the operating system refuses, or if there is one already.
        """
        return Board(BoardFile.create(board_name(uuid), LAYOUT))

    @property
    def answered_revision(self) -> int:
        """Of the last request that was answered, or passed over."""
        with self._lock:
            return self._answered

    def publish(self, figures: BoardFigures) -> None:
        """Show these instead of the last ones. Raises `SegmentError`."""
        with self._lock:
            self._file.publish(lambda number: board_format.pack_snapshot(number, figures))

    def next_request(self) -> tuple[int, TierRequest] | None:
        """The oldest request that has no answer, as it was found: check it. None: there is none."""
        with self._lock:
            pending = self._file.pending(board_format.unpack_request, self._answered)
            return next(iter(pending.items()), None)

    def answer(self, answer: TierAnswer) -> None:
        """Say what came of a request. Raises `SegmentError`."""
        with self._lock:
            self._answered = max(self._answered, answer.revision)
            self._file.answer(answer.revision, board_format.pack_answer(answer))

    def close(self) -> None:
        """Remove the file. Repeatable; a forked child leaves it where it is."""
        with self._lock:
            self._file.close()
