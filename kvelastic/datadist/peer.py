"""A peer of this cluster: its link, who uses it, and why it is of no use any more.

linked -- used by transfers, or by a layered one, never both --> linked
   |-- a transfer's timeout --> broken (LLM_WAIT_PROCESS_TIMEOUT) --.
   |-- the peer has gone ----> broken (LLM_LINK_FAILED) ------------+--> linked anew
   '-- unlinked by either side ----> forgotten <--------------------'
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeAlias

from kvelastic.datadist import wire
from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.pieces import Run
from kvelastic.datadist.status import (
    LLMException,
    LLMParamError,
    LLMStatusCode,
    failure,
    status_of,
    status_of_number,
)
from kvelastic.errors import (
    ChannelTimeoutError,
    KvelasticError,
    MessageError,
    UnknownBlockError,
)
from kvelastic.transfer import Link, Node, Piece

AnyKey: TypeAlias = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey
_MOST_FOUND: Final = 256


class Peer:
    """See the module. Any thread."""

    def __init__(self, cluster_id: int, link: Link) -> None:
        self.cluster_id = cluster_id
        self.link = link
        self.broken: LLMStatusCode | None = None
        self.is_wanted = link.is_client
        """Whether `link_clusters` of this side has returned it: the peer may have made it first."""
        self.found: dict[tuple[AnyKey, bool], wire.Cache] = {}
        """Blocks caches that keys led to. A copy's claim names the cache, so one that has gone is
        never taken for another one."""
        self._changed = threading.Condition()
        self._calls = {False: 0, True: 0}  # by whether they are layered
        self._is_closing = False

    @property
    def is_linked(self) -> bool:
        """Whether transfers may begin."""
        return self.broken is None and self.link.is_open

    @contextmanager
    def used(self, *, is_layered: bool) -> Iterator[None]:
        """A call uses the link. Raises `LLMException` where it cannot."""
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
    def is_in_use(self) -> bool:
        """Whether a call uses it now."""
        return any(self._calls.values())

    def refuse_broken(self) -> None:
        """Raise what a link that is of no use any more is answered with."""
        broken = self.broken
        if broken is None and not self.link.is_open:
            broken = LLMStatusCode.LLM_LINK_FAILED
        if broken is not None:
            why = "a transfer timed out" if self.broken else "the peer has gone"
            raise failure(
                broken, f"the link to cluster {self.cluster_id} is broken ({why}); link it anew"
            )

    def break_off(self, status: LLMStatusCode) -> None:
        """Nothing begins over this link any more; what the peer may still do has no effect."""
        self.broken = status
        self.link.unlink(0, force=True)

    def close(self, deadline_s: float) -> bool:
        """Let no call begin any more; False: some are still under way at the deadline."""
        with self._changed:
            self._is_closing = True
            if self._changed.wait_for(
                lambda: not self.is_in_use, max(deadline_s - time.monotonic(), 0)
            ):
                return True
            self._is_closing = False
            return False


class LinkCall:
    """A manager's call to one peer, with one deadline for all that it does.

    Raises `LLMException`: the peer's refusal, `LLM_TIMEOUT` (the link is of no more use then),
    `LLM_LINK_FAILED` where the peer has gone.
    """

    def __init__(self, peer: Peer, node: Node, caches: LocalCaches, timeout_s: float) -> None:
        self._peer = peer
        self._node = node
        self._caches = caches
        self._deadline_s = time.monotonic() + timeout_s

    def use(
        self, key: AnyKey, copy: Callable[[wire.Cache], None], *, is_write: bool = False
    ) -> None:
        """Copy from or to the cache that a key leads to.

        The peer is asked for a model's blocks cache once, and again where that has gone. Other keys
        are asked for each time: they may go before their cache does.
        """
        known = self._peer.found.get((key, is_write))
        if known is not None:
            try:
                copy(known)
                return
            except KvelasticError as error:
                if status_of(error) is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                    raise
                self._peer.found.pop((key, is_write), None)
        found = self._find(key, is_write)
        if isinstance(key, BlocksCacheKey):
            if len(self._peer.found) >= _MOST_FOUND:
                self._peer.found.clear()
            self._peer.found[key, is_write] = found
        copy(found)

    def _find(self, key: AnyKey, is_write: bool) -> wire.Cache:
        answer = self.ask(wire.Find(wire.key_said(key), is_write))
        if not isinstance(answer, wire.Found):
            raise _unexpected(answer)
        cache = answer.cache
        try:
            is_whole = cache.row < cache.desc.batch_size and all(
                len(one) == cache.desc.num_tensors for one in cache.addrs
            )
        except (TypeError, ValueError) as error:
            raise MessageError(f"a peer describes an invalid cache: {error}") from None
        if not is_whole:
            raise MessageError("a peer describes a cache without all of its addresses")
        return cache

    def copy(
        self, own: Entry, theirs: wire.Cache, pairs: Sequence[tuple[Run, Run]], *, is_push: bool
    ) -> None:
        """Copy between runs of a cache of ours and of a peer's, on each device; all or an error."""
        if len(own.addrs) != len(theirs.addrs):
            raise LLMParamError(
                f"the caches are on {len(own.addrs)} and {len(theirs.addrs)} devices"
            )
        claim = wire.claim_of(theirs.cache_id)
        link = self._peer.link
        with self._caches.held(own), ExitStack() as holds:
            for here, there in zip(own.addrs, theirs.addrs, strict=True):
                ours = [(here[run.tensor] + run.offset, run.size) for run, _ in pairs]
                others = [(there[run.tensor] + run.offset, run.size) for _, run in pairs]
                self._hold_pages(own, ours, holds)
                with self._told_if_gone(theirs):
                    if is_push:
                        link.push(ours, others, self.left_s(), claim=claim)
                    else:
                        link.pull(others, ours, self.left_s(), claim=claim)

    def push_to_addresses(self, source: Entry, pieces: Sequence[tuple[Run, int]]) -> None:
        """Copy runs of a cache of ours to addresses of the peer's, which lie in its caches."""
        of = source.addrs[0]
        with self._caches.held(source), ExitStack() as holds:
            sources = [(of[run.tensor] + run.offset, run.size) for run, _ in pieces]
            targets = [(address, run.size) for run, address in pieces]
            self._hold_pages(source, sources, holds)
            self._peer.link.push(sources, targets, self.left_s(), claim=wire.CLAIM_OF_ADDRESSES)

    @contextmanager
    def _told_if_gone(self, cache: wire.Cache) -> Iterator[None]:
        """A page of a cache that went after it was found is `LLM_KV_CACHE_NOT_EXIST`, too.

        The peer pins before it looks whose the page is, and can only say that it is nobody's.
        """
        try:
            yield
        except UnknownBlockError:
            self.ask(wire.Find(wire.ById(cache.cache_id, 0), False))
            raise  # the cache is there: it is a caller's, who has not taken that block

    def _hold_pages(self, entry: Entry, pieces: Sequence[Piece], holds: ExitStack) -> None:
        """What lies in an elastic pool of a caller's stays mapped while it is copied."""
        if entry.origin == "registered" and entry.remote_accessible:
            for registered, some in self._node.ranges.find(pieces).items():
                holds.callback(registered.hold(some).release)

    def moved(self, cache: wire.Cache, tensors: range) -> None:
        """Notify the peer that these tensors of a row were copied (`CacheTable.moved`)."""
        answer = self.ask(wire.Moved(cache.cache_id, cache.row, tensors.start, len(tensors)))
        if not isinstance(answer, wire.Noted):
            raise _unexpected(answer)

    def ask(self, question: wire.Question) -> wire.Answer:
        """What the peer answers. Raises `LLMException` for a refusal."""
        body = self._peer.link.ask(wire.encode(question), self.left_s())
        answer = wire.decode_answer(body)
        if isinstance(answer, wire.Refused):
            raise failure(
                status_of_number(answer.status), f"cluster {self._peer.cluster_id}: {answer.why}"
            )
        return answer

    def left_s(self) -> float:
        """Seconds to the deadline. Raises `ChannelTimeoutError` after it."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise ChannelTimeoutError("the call has taken longer than sync_kv_timeout")
        return left_s


@contextmanager
def calling(
    peer: Peer, node: Node, caches: LocalCaches, timeout_s: float, *, is_layered: bool
) -> Iterator[LinkCall]:
    """A call to a peer; a timeout breaks its link, for what comes later is nobody's any more."""
    with peer.used(is_layered=is_layered):
        try:
            yield LinkCall(peer, node, caches, timeout_s)
        except ChannelTimeoutError as error:
            peer.break_off(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
            raise failure(
                LLMStatusCode.LLM_TIMEOUT,
                f"cluster {peer.cluster_id} was not done within sync_kv_timeout; link it anew",
            ) from error
        except LLMException:
            raise
        except KvelasticError as error:
            raise failure(status_of(error), f"cluster {peer.cluster_id}: {error}") from error


def busy(cluster_id: int) -> LLMException:
    """The exception for a link that others use."""
    return failure(
        LLMStatusCode.LLM_LINK_BUSY, f"the link to cluster {cluster_id} is in use by another call"
    )


def _unexpected(answer: wire.Answer) -> MessageError:
    return MessageError(f"a {type(answer).__name__} is no answer to what was asked")
