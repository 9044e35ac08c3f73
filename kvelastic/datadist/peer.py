"""A peer of this cluster: its link, the calls that use it, and why it is unusable.

linked -- used by transfers, or by a layered one, never both --> linked
   |-- a transfer's timeout --> broken (LLM_WAIT_PROCESS_TIMEOUT) --.
   |-- the peer has gone ----> broken (LLM_LINK_FAILED) ------------+--> linked again
   '-- unlinked by either side ----> forgotten <--------------------'
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

from kvelastic import _vmm
from kvelastic.datadist import checks, wire
from kvelastic.datadist.cache_layout import LayerRanges, Part, Run, block_indices, pairs_merged
from kvelastic.datadist.descriptors import AnyKey, BlocksCacheKey
from kvelastic.datadist.local_caches import Entry, LocalCaches
from kvelastic.datadist.status import (
    LLMException,
    LLMParamError,
    LLMStatusCode,
    failure,
    status_of,
    status_of_number,
)
from kvelastic.errors import ChannelTimeoutError, KvelasticError, MessageError, UnknownBlockError
from kvelastic.messages import Message
from kvelastic.transfer import Link, Node, Piece
from kvelastic.transfer.leases import release

T = TypeVar("T")
_MOST_FOUND: Final = 256


class Peer:
    """A linked peer. Any thread may call."""

    def __init__(self, cluster_id: int, link: Link) -> None:
        self.cluster_id = cluster_id
        self.link = link
        self.broken: LLMStatusCode | None = None
        self.is_wanted = link.is_client
        """Whether `link_clusters` of this side returned the link.

        The peer may have made it first.
        """
        self.found: dict[tuple[AnyKey, bool], wire.Cache] = {}
        """Blocks caches found by key.

        A copy's claim names the cache, so a deallocated cache is never mistaken for another one.
        """
        self._changed = threading.Condition()
        self._calls = {False: 0, True: 0}  # keyed by whether they are layered
        self._is_closing = False

    @property
    def is_linked(self) -> bool:
        """Whether transfers can start."""
        return self.broken is None and self.link.is_open

    @contextmanager
    def used(self, *, is_layered: bool) -> Iterator[None]:
        """Use the link for a call. Raises `LLMException` if that is impossible."""
        with self._changed:
            self.refuse_broken()
            if self._is_closing or self._calls[not is_layered]:
                raise busy(self.cluster_id)
            self._calls[is_layered] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[is_layered] -= 1
                self._changed.notify_all()

    @property
    def calls(self) -> int:
        """Number of calls that use the link now."""
        return sum(self._calls.values())

    def refuse_broken(self) -> None:
        """Raise the error for a broken link, if it is broken."""
        broken = self.broken
        if broken is None and not self.link.is_open:
            broken = LLMStatusCode.LLM_LINK_FAILED
        if broken is not None:
            why = "a transfer timed out" if self.broken else "the peer has gone"
            raise failure(
                broken, f"the link to cluster {self.cluster_id} is broken ({why}); link it again"
            )

    def ask(self, question: Message, wanted: type[T], timeout_s: float) -> T:
        """Send a question and return the peer's reply. Blocks.

        Raises `LLMException` for a refusal, and the errors of `Link.ask`.
        """
        answer = wire.PROTOCOL.decode(self.link.ask(wire.PROTOCOL.encode(question), timeout_s))
        if isinstance(answer, wire.Refused):
            raise failure(
                status_of_number(answer.status), f"cluster {self.cluster_id}: {answer.why}"
            )
        if not isinstance(answer, wanted):
            raise MessageError(f"a {type(answer).__name__} is no answer to what was asked")
        return answer

    def break_off(self) -> None:
        """Stop using the link after a timeout; later messages of the peer have no effect."""
        self.broken = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        self.link.unlink(0, force=True)

    def close(self, deadline_s: float) -> bool:
        """Refuse new calls and wait for current ones.

        Return False if some remain at the deadline.
        """
        with self._changed:
            self._is_closing = True
            if self._changed.wait_for(
                lambda: not self.calls, max(deadline_s - time.monotonic(), 0)
            ):
                return True
            self._is_closing = False
            return False


class Transfer:
    """A copy between a cache of this process and the cache of a key."""

    def __init__(
        self,
        key: AnyKey,
        own: Entry,
        layers: LayerRanges,
        ours: Part,
        theirs: Part,
        size: int,
        *,
        is_push: bool = False,
    ) -> None:
        """`size` is that of `Part.runs`; the row of `theirs` is the key's.

        Raises `LLMParamError` for an invalid key, and if `ours` is not in the local cache.
        """
        self.key, self.own, self.is_push = key, own, is_push
        self.find: Final = wire.Find(*key.index, is_push)
        self._layers, self._ours, self._theirs, self._size = layers, ours, theirs, size
        self._tensors = layers.tensors(own.desc, of_source=is_push)
        self._our_runs = ours.runs(own.desc, self._tensors, size, theirs)

    @classmethod
    def of_row(
        cls,
        key: AnyKey,
        own: Entry,
        layers: LayerRanges,
        ours: Part,
        size: int = -1,
        their_offset: int = 0,
        *,
        is_push: bool = False,
    ) -> Transfer:
        """Copy `size` bytes between a local row and the row of a key; -1: to the row's end."""
        size = own.desc.row_bytes - ours.offset if size == -1 else size
        return cls(key, own, layers, ours, Part(offset=their_offset), size, is_push=is_push)

    @classmethod
    def of_blocks(
        cls,
        key: AnyKey,
        own: Entry,
        layers: LayerRanges,
        our_blocks: Sequence[int],
        their_blocks: Sequence[int],
        *,
        is_push: bool = False,
    ) -> Transfer:
        """Copy between local blocks and the blocks of a key, or the row of another key."""
        our_name, their_name = ("src_blocks", "dst_blocks")[:: 1 if is_push else -1]
        ours = block_indices(our_name, own.desc, our_blocks)
        theirs = checks.integers(
            their_name, their_blocks, most=checks.MAX_UINT32, empty=not is_push
        )
        is_blocks = isinstance(key, BlocksCacheKey)
        if len(theirs) != (len(ours) if is_blocks else 0):
            raise LLMParamError(
                f"{len(ours)} {our_name} and {len(theirs)} {their_name} are given; give as"
                " many, and src_blocks for a BlocksCacheKey only"
            )
        parts = Part(ours), Part(theirs if is_blocks else None)
        return cls(key, own, layers, *parts, own.desc.row_bytes, is_push=is_push)

    def tensors_of(self, found: wire.Cache) -> range:
        """Return the peer's tensors. Raises `LLMParamError` unless they are as many as the own."""
        theirs = self._layers.tensors(found.desc, of_source=not self.is_push)
        if len(theirs) != len(self._tensors):
            raise LLMParamError(
                f"{len(self._tensors)} tensors here and {len(theirs)} of the peer are named; name"
                " as many layers of both"
            )
        return theirs

    def pairs(self, found: wire.Cache) -> list[tuple[Run, Run]]:
        """Return runs of the local and of the peer's cache in pairs. Raises `LLMParamError`."""
        self.own.check_devices(found.addrs)
        theirs = self._theirs
        if theirs.blocks is not None:
            block_indices("blocks of the peer", found.desc, theirs.blocks)
        elif found.is_blocks:
            raise LLMParamError("the key leads to a blocks cache; name blocks, by a BlocksCacheKey")
        else:
            theirs = Part(row=found.row, offset=theirs.offset)
        runs = theirs.runs(found.desc, self.tensors_of(found), self._size, self._ours)
        return pairs_merged(self._our_runs, runs)


class LinkCall:
    """A manager's call to one peer, with one deadline for all its steps.

    Methods raise `LLMException`: the peer's refusal, `LLM_TIMEOUT` (which breaks the link), or
    `LLM_LINK_FAILED` if the peer is gone.
    """

    def __init__(self, peer: Peer, node: Node, caches: LocalCaches, deadline_s: float) -> None:
        self.peer = peer
        self._node = node
        self._caches = caches
        self._deadline_s = deadline_s

    def transfer(self, transfer: Transfer) -> None:
        """Copy between a local cache and the cache of a key. All is copied or it raises.

        The peer is asked once for a model's blocks cache, and again after that was deallocated. It
        is asked each time for other keys, because they may be dropped before their cache.
        """
        remembered = transfer.key, transfer.is_push
        known = self.peer.found.get(remembered)
        if known is not None:
            try:
                self._copy(transfer, known)
                return
            except KvelasticError as error:
                if status_of(error) is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                    raise
                self.peer.found.pop(remembered, None)
        found = self.peer.ask(transfer.find, wire.Cache, self.left_s())
        if isinstance(transfer.key, BlocksCacheKey):
            if len(self.peer.found) >= _MOST_FOUND:
                self.peer.found.clear()
            self.peer.found[remembered] = found
        self._copy(transfer, found)
        if not isinstance(transfer.key, BlocksCacheKey):
            tensors = transfer.tensors_of(found)
            moved = wire.Moved(found.cache_id, found.row, tensors.start, len(tensors))
            self.peer.ask(moved, wire.Told, self.left_s())

    def _copy(self, transfer: Transfer, found: wire.Cache) -> None:
        """Copy between a local and a peer's cache on each device."""
        pairs = transfer.pairs(found)
        own, claim = transfer.own, wire.claim_of(found.cache_id)
        with self._caches.held(own), ExitStack() as holds:
            for here, there in zip(own.addrs, found.addrs, strict=True):
                ours = [(here[run.tensor] + run.offset, run.size) for run, _ in pairs]
                theirs = [(there[run.tensor] + run.offset, run.size) for _, run in pairs]
                self._hold_pages(own, ours, holds)
                try:
                    if transfer.is_push:
                        self.peer.link.push(ours, theirs, self.left_s(), claim=claim)
                    else:
                        self.peer.link.pull(theirs, ours, self.left_s(), claim=claim)
                except UnknownBlockError:
                    # The peer pins pages before it checks their cache, so it can only report an
                    # unknown page. Raises if the cache was dropped after it was found.
                    gone = wire.Find("row", found.cache_id, 0, False)
                    self.peer.ask(gone, wire.Cache, self.left_s())
                    raise  # the cache exists: its caller has not allocated that block

    def push_to_addresses(self, source: Entry, pieces: Sequence[tuple[Run, int]]) -> None:
        """Copy runs of a local cache to addresses at the peer, which must be in its caches."""
        of = source.addrs[0]
        sources = [(of[run.tensor] + run.offset, run.size) for run, _ in pieces]
        targets = [(address, run.size) for run, address in pieces]
        with self._caches.held(source), ExitStack() as holds:
            self._hold_pages(source, sources, holds)
            self.peer.link.push(sources, targets, self.left_s(), claim=wire.claim_of(None))

    def _hold_pages(self, entry: Entry, pieces: Sequence[Piece], holds: ExitStack) -> None:
        """Keep memory in a caller's elastic pool mapped during the copy."""
        if entry.is_registered and entry.remote_accessible:
            held = self._node.ranges.hold(_vmm.pack_pieces(pieces))
            holds.callback(release, held.values())

    def left_s(self) -> float:
        """Return the seconds until the deadline. Raises `ChannelTimeoutError` after it."""
        return left_s(self._deadline_s)


def busy(cluster_id: int) -> LLMException:
    """Return the exception for a link that another call uses."""
    return failure(
        LLMStatusCode.LLM_LINK_BUSY, f"the link to cluster {cluster_id} is in use by another call"
    )


def left_s(deadline_s: float) -> float:
    """Return the seconds until a `time.monotonic` time. Raises `ChannelTimeoutError` after it."""
    seconds = deadline_s - time.monotonic()
    if seconds <= 0:
        raise ChannelTimeoutError("the peer has not answered in time")
    return seconds
