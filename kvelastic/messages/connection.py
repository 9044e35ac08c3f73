"""One connection of an endpoint: sends and receives frames, and matches replies to requests.

Any thread may send. The endpoint's thread sends what the socket does not accept immediately. Only
that thread reads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
)
from kvelastic.messages.frames import (
    MOST_DESCRIPTORS,
    Frame,
    FrameReader,
    FrameWriter,
    Kind,
    error_body,
    error_of,
)
from kvelastic.messages.peers import Peer
from kvelastic.messages.protocol import Message, Protocol

_log = logging.getLogger("kvelastic.messages")
MOST_UNANSWERED: Final = 256
"""Maximum requests of one peer without a reply."""
_READ_BYTES: Final = 1 << 18
_LEAST_READ_BYTES: Final = 1 << 16
"""Of an authenticated peer, so that most messages come in one read."""
_DESCRIPTORS_SPACE: Final = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)


class Request:
    """A received message. Its descriptors are closed after the handler, unless taken."""

    def __init__(self, connection: Connection, frame: Frame, message: Message) -> None:
        self.connection: Final = connection
        self.message: Final = message
        self.wants_reply: Final = frame.kind == Kind.REQUEST
        self._number = frame.number
        self._descriptors = frame.descriptors
        self._is_open = self.wants_reply

    def take_descriptors(self) -> tuple[int, ...]:
        """Take the received descriptors; the caller must close them."""
        taken, self._descriptors = self._descriptors, ()
        return taken

    def answer(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send the reply, once, from any thread, during or after the handler.

        The caller keeps ownership of `descriptors`. Does nothing if the peer is gone or the message
        is a notification, which takes no reply. Raises `MessageError` if the reply is too large,
        `ChannelError` if a descriptor cannot be passed, and `InvalidArgumentError` for descriptors
        over TCP; then the peer receives that error.
        """
        if self._settle():
            try:
                body = self.connection.protocol.encode(message)
                self.connection.reply(Kind.REPLY, self._number, body, descriptors)
            except KvelasticError as error:
                self.connection.reply(Kind.ERROR, self._number, error_body(error))
                raise

    def refuse(self, error: BaseException) -> None:
        """Send an error instead of the reply.

        The peer does not receive the text of errors other than `KvelasticError`.
        """
        if self._settle():
            self.connection.reply(Kind.ERROR, self._number, error_body(error))

    @contextlib.contextmanager
    def refusing_errors(self) -> Iterator[None]:
        """Send an exception of the block as the reply; log it if it is unexpected."""
        try:
            yield
        except KvelasticError as error:
            self.refuse(error)
        except Exception as error:
            _log.exception("a %s was not answered", type(self.message).__name__)
            self.refuse(error)

    def close_descriptors(self) -> None:
        """Close the descriptors that were not taken."""
        for fd in self.take_descriptors():
            os.close(fd)

    def _settle(self) -> bool:
        was_open, self._is_open = self._is_open, False
        return was_open


class Reply:
    """The reply to a request, which has arrived or is to come. For one thread at a time."""

    def __init__(
        self,
        protocol: Protocol,
        waiting: dict[int, SimpleQueue[Frame | KvelasticError]],
        number: int,
    ) -> None:
        self.number: Final = number
        self._protocol = protocol
        self._waiting = waiting
        self._arrived: SimpleQueue[Frame | KvelasticError] = SimpleQueue()
        self._frame: Frame | KvelasticError | None = None
        waiting[number] = self._arrived

    def arrives_within(self, timeout_s: float) -> bool:
        """Wait for the reply, or for the end of the connection; return whether it is there."""
        if self._frame is None:
            with contextlib.suppress(Empty):
                self._frame = self._arrived.get(timeout=max(timeout_s, 0))
        return self._frame is not None

    def take(self) -> tuple[Message, tuple[int, ...]]:
        """Return the message and its descriptors, which the caller must close. Blocks.

        Raises the peer's error, `ChannelClosedError` if the connection ended, and `MessageError`
        for an invalid reply.
        """
        frame = self._arrived.get() if self._frame is None else self._frame
        if isinstance(frame, KvelasticError):
            raise frame
        if frame.kind == Kind.ERROR:
            raise error_of(frame.body)
        try:
            return self._protocol.decode(frame.body), frame.descriptors
        except BaseException:
            _close_all(frame.descriptors)
            raise

    def drop(self) -> bool:
        """Stop waiting; the reply is dropped when it comes. False if it has come already."""
        return self._waiting.pop(self.number, None) is not None


class Connection:
    """A connection to an authenticated peer, made by an endpoint. Thread-safe."""

    def __init__(
        self,
        connected: socket.socket,
        peer: Peer,
        protocol: Protocol,
        reader: FrameReader,
        writer: FrameWriter,
        *,
        wake: Callable[[Connection], None],
        loop_thread: Callable[[], int | None],
    ) -> None:
        self.peer: Final = peer
        self.protocol: Final = protocol
        self.socket: Final = connected
        self._reader = reader
        self._writer = writer
        self._wake = wake
        self._loop_thread = loop_thread
        self._lock = threading.Lock()  # leaf lock: only the socket is used
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._most_queued_bytes = 4 * (protocol.most_bytes + 1024)
        self._waiting: dict[int, SimpleQueue[Frame | KvelasticError]] = {}
        self._numbers = itertools.count(1)
        self._unanswered = 0
        self._sent_at_s = time.monotonic()
        self._ended: KvelasticError | None = None

    # --- any thread ----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False once the kernel has reported that the peer is gone."""
        return self._ended is None

    @property
    def ended(self) -> KvelasticError | None:
        """Why the connection ended; None while it is open."""
        return self._ended

    def call(self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()) -> Message:
        """Send a request and wait for its reply; close descriptors received with the reply.

        Blocks for at most `timeout_s` seconds. Raises the peer's error; `ChannelTimeoutError`,
        after which a late reply is dropped; `ChannelClosedError` if the connection ends;
        `MessageError` for an invalid reply; and `InvalidArgumentError` in the endpoint's own
        thread.
        """
        reply, received = self.call_for_descriptors(message, timeout_s, descriptors)
        for fd in received:
            os.close(fd)
        return reply

    def call_for_descriptors(
        self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> tuple[Message, tuple[int, ...]]:
        """Like `call`, but also return the received descriptors; the caller must close them."""
        reply = self.request(message, descriptors)
        try:
            if not reply.arrives_within(timeout_s) and reply.drop():
                raise ChannelTimeoutError(
                    f"{self.peer} has not answered a {type(message).__name__} in {timeout_s:g} s"
                )
            return reply.take()
        finally:
            reply.drop()

    def request(self, message: Message, descriptors: Sequence[int] = ()) -> Reply:
        """Send a request without waiting. The caller must `drop` the reply.

        Raises `ChannelClosedError`, and `InvalidArgumentError` in the endpoint's own thread.
        """
        if threading.get_ident() == self._loop_thread():
            raise InvalidArgumentError("a handler cannot wait for a reply; use a separate thread")
        body = self.protocol.encode(message)
        reply = Reply(self.protocol, self._waiting, next(self._numbers))
        try:
            self._send(Kind.REQUEST, reply.number, body, descriptors)
        except BaseException:
            reply.drop()
            raise
        return reply

    def notify(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message without a reply. Never blocks. Raises `ChannelClosedError`."""
        self._send(Kind.NOTICE, 0, self.protocol.encode(message), descriptors)

    def close(self) -> None:
        """End the connection. Waiting calls raise, and the peer detects the end. Idempotent."""
        self.end(ChannelClosedError("the connection was closed here"))

    def reply(self, kind: Kind, number: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a reply; called by `Request`. Raises as `_send`, but not if the peer is gone."""
        with self._lock:
            self._unanswered -= 1  # before the peer can send its next request
        try:
            self._send(kind, number, body, descriptors)
        except ChannelClosedError:
            pass
        except KvelasticError:  # nothing was sent
            with self._lock:
                self._unanswered += 1
            raise

    def _send(self, kind: Kind, number: int, body: bytes, descriptors: Sequence[int] = ()) -> None:
        if len(descriptors) > MOST_DESCRIPTORS:
            raise InvalidArgumentError(
                f"{len(descriptors)} descriptors are too many for a message;"
                f" {MOST_DESCRIPTORS} are allowed"
            )
        if descriptors and self.peer.uid is None:
            raise InvalidArgumentError("descriptors go over a Unix socket only")
        with self._lock:
            if self._ended is not None:
                raise ChannelClosedError(f"the connection to {self.peer} has ended: {self._ended}")
            copies = _copies_of(descriptors)
            frame = self._writer.write(kind, number, body, len(descriptors))
            self._sent_at_s = time.monotonic()
            self._queue.append((memoryview(frame), copies))
            self._queued_bytes += len(frame)
            failure = self._flush()
            is_left = bool(self._queue)
            if failure is None and self._queued_bytes > self._most_queued_bytes:
                failure = ChannelError(f"{self.peer} does not read its messages")
        if failure is not None:
            self.end(failure)
            raise ChannelClosedError(str(failure)) from failure
        if is_left:
            self._wake(self)

    def _flush(self) -> KvelasticError | None:
        """Send as much as the socket accepts. The caller holds the lock."""
        while self._queue:
            data, descriptors = self._queue[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self.socket, [data], descriptors)
                else:
                    sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                return ChannelClosedError(f"{self.peer} has gone: {error}")
            _close_all(descriptors)
            self._queued_bytes -= sent
            if sent < len(data):
                self._queue[0] = (data[sent:], [])
            else:
                self._queue.popleft()
        return None

    def end(self, reason: KvelasticError) -> None:
        """Shut the connection down; the endpoint's thread then removes it.

        Keeps the reason of the first call.
        """
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            for _, descriptors in self._queue:
                _close_all(descriptors)
            self._queue.clear()
            self._queued_bytes = 0
        for arrived in list(self._waiting.values()):
            arrived.put(ChannelClosedError(f"{self.peer} has gone: {reason}"))
        self._wake(self)

    # --- the endpoint's thread -----------------------------------------------------------------

    @property
    def wants_to_write(self) -> bool:
        """Whether data is queued."""
        return bool(self._queue)

    def write(self) -> None:
        """Send queued data; call it when the socket is writable."""
        with self._lock:
            failure = self._flush()
        if failure is not None:
            self.end(failure)

    def send_alive(self, now_s: float, every_s: float) -> None:
        """Send a frame if none was sent for `every_s` seconds, so that a lost host is detected."""
        if not self._queue and now_s - self._sent_at_s >= every_s:
            with contextlib.suppress(ChannelClosedError):
                self._send(Kind.ALIVE, 0, b"")

    def read(self, handle: Callable[[Request], None]) -> None:
        """Read once and dispatch the frames; requests go to `handle`.

        Ends the connection if the data is invalid.
        """
        try:
            receive_into(self.socket, self._reader, _LEAST_READ_BYTES)
            self.dispatch(handle)
        except KvelasticError as error:
            self._report_and_end(error)

    def dispatch(self, handle: Callable[[Request], None]) -> None:
        """Dispatch the complete frames in the reader."""
        while self._ended is None and (frame := self._reader.next()) is not None:
            if frame.kind in {Kind.REPLY, Kind.ERROR}:
                self._take_reply(frame)
            elif frame.kind in {Kind.REQUEST, Kind.NOTICE}:
                self._take_request(frame, handle)
            elif frame.kind != Kind.ALIVE or frame.body:
                raise MessageError(f"a {frame.kind.name} came where none is due")

    def _take_reply(self, frame: Frame) -> None:
        if frame.kind == Kind.ERROR and frame.number == 0:
            self.end(error_of(frame.body))
            return
        arrived = self._waiting.pop(frame.number, None)
        if arrived is None:  # the caller has stopped waiting
            _close_all(frame.descriptors)
        else:
            arrived.put(frame)

    def _take_request(self, frame: Frame, handle: Callable[[Request], None]) -> None:
        try:
            message = self.protocol.decode(frame.body)
        except MessageError:
            _close_all(frame.descriptors)
            raise
        request = Request(self, frame, message)
        try:
            if request.wants_reply:
                with self._lock:
                    self._unanswered += 1
                if self._unanswered > MOST_UNANSWERED:
                    raise MessageError(f"{MOST_UNANSWERED} requests wait already; ask later")
            handle(request)
        except MessageError as error:
            request.refuse(error)
        finally:
            request.close_descriptors()

    def _report_and_end(self, error: KvelasticError) -> None:
        if not isinstance(error, ChannelClosedError):
            with contextlib.suppress(ChannelClosedError):
                self._send(Kind.ERROR, 0, error_body(error))
        self.end(error)

    def release(self) -> None:
        """Close the socket, once no selector watches it."""
        _close_all(self._reader.take_descriptors())
        with self._lock:
            self.socket.close()


def receive_into(connected: socket.socket, reader: FrameReader, least_bytes: int = 4096) -> None:
    """Read from the non-blocking socket once and feed the reader.

    Reads what completes the current frame, but at least `least_bytes` if they are there.

    Raises `ChannelClosedError` if the peer is gone, and `MessageError` for too many descriptors.
    """
    wanted = min(max(reader.wanted_bytes, least_bytes), _READ_BYTES)
    try:
        if connected.family == socket.AF_UNIX:
            data, ancillary, flags, _ = connected.recvmsg(
                wanted, _DESCRIPTORS_SPACE, socket.MSG_CMSG_CLOEXEC
            )
            descriptors = _descriptors_of(ancillary)
        else:
            data, descriptors, flags = connected.recv(wanted), [], 0
    except (BlockingIOError, InterruptedError):
        return
    except OSError as error:
        raise ChannelClosedError(f"the peer has gone: {error}") from error
    reader.feed(data, descriptors)  # first, so that they are closed with the reader
    if flags & socket.MSG_CTRUNC:
        raise MessageError("descriptors were lost: too many, or this process has none left")
    if not data:
        raise ChannelClosedError("the peer has closed the connection or has died")


def _descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % 4
            descriptors += memoryview(data[:whole]).cast("i").tolist()
    return descriptors


def _copies_of(descriptors: Sequence[int]) -> list[int]:
    """Duplicate descriptors. Raises `ChannelError` if none are left; then none stays open."""
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in descriptors)  # keeps the copies made before a failure
    except OSError as error:
        _close_all(copies)
        raise ChannelError(f"a descriptor cannot be passed: {error}; raise `ulimit -n`") from error
    return copies


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
