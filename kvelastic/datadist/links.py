"""The links of a cluster: linking, unlinking, calls of managers, and requests of peers.

    links = Links(cluster_id, role, caches, options, settings)
    links.link(cluster, deadline_s)
    with links.call(2) as peer: peer.transfer(transfer)
    links.close()

`kvelastic.transfer` provides links, leases and copies; this module applies them to caches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvelastic.config import Config
from kvelastic.datadist import wire
from kvelastic.datadist.descriptors import Index, LLMClusterInfo
from kvelastic.datadist.enums import LLMRole
from kvelastic.datadist.exposed import Exposed
from kvelastic.datadist.group_links import Group, GroupLinks, Joined
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.options import Options
from kvelastic.datadist.peer import LinkCall, Peer, busy, left_s
from kvelastic.datadist.socket_addresses import SocketAddresses
from kvelastic.datadist.status import (
    LLMException,
    LLMParamError,
    LLMStatusCode,
    as_llm_exceptions,
    failure,
    status_of,
)
from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    ConfigError,
    KvelasticError,
    MessageError,
)
from kvelastic.messages import Address, Message
from kvelastic.transfer import Link, Node

_log = logging.getLogger("kvelastic")

MOST_LINKS: Final = 512
LEAST_LEASE_S: Final = 5.0


class Links:
    """The links of a cluster. Any thread may call.

    Do not call `close` or `switch_role` concurrently with other calls. Lock order: only a peer's
    own lock is taken under `_lock`. No message is sent while `_lock` is held.
    """

    def __init__(
        self,
        cluster_id: int,
        role: LLMRole,
        caches: LocalCaches,
        options: Options,
        settings: Config,
    ) -> None:
        """Listen as the options require. Raises `ChannelError`, `ConfigError`, `SecretError`."""
        self._cluster_id = cluster_id
        self._role = role
        self._caches = caches
        self._options = options
        self._socket_addresses = SocketAddresses.of(settings)
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._in_progress: set[int] = set()
        self.has_linked = False
        """Whether this cluster has started to link.

        After that, newly registered caches are inaccessible to peers by default. A link made by a
        peer does not count, because it may come at any time.
        """
        self.exposed = Exposed(caches)
        self.groups = GroupLinks(self._join_member, self._leave_member)
        self._node = self._listen(options.listen)

    def _listen(self, addresses: tuple[tuple[str, int], ...]) -> Node:
        sockets = self._socket_addresses.listening(addresses)
        if self._options.is_cache_manager:
            own = self._socket_addresses.cluster(self._cluster_id)
            try:
                return self._open_node([*sockets, own])
            except ChannelError as error:
                if str(own) not in str(error):
                    raise
                _log.warning(
                    "another process is cluster %d: members of groups will not find this one, and"
                    " link() will fail (%s)",
                    self._cluster_id,
                    error,
                )
        return self._open_node(sockets)

    def _open_node(self, listen: list[Address]) -> Node:
        node = Node(
            self._cluster_id,
            answer=self._answer,
            claim=self._caches.claim,
            listen=listen,
            secret=self._socket_addresses.secret,
            allowed=self._socket_addresses.allowed,
            lease_s=max(self._options.sync_kv_timeout_s, LEAST_LEASE_S),
            most_links=MOST_LINKS,
            data_ports=self._socket_addresses.data_ports,
            role=self._role.name,
            on_link=self._linked,
            on_end=self._ended,
        )
        try:
            self.exposed.bind(node)
        except BaseException:
            node.close()
            raise
        return node

    # --- one side links ----------------------------------------------------------------------

    def link(self, cluster: LLMClusterInfo, deadline_s: float) -> None:
        """Link with a listening peer. Raises `LLMException`, and errors of `Node.link`.

        A link that the peer has made also serves this side.
        """
        cluster_id = cluster.remote_cluster_id
        assert cluster_id is not None
        with self._alone(cluster_id, to_link=True) as peer:
            self.has_linked = True
            link = peer.link if peer is not None and peer.is_linked else None
            if link is None:
                host, port = cluster.remote_ip_infos[0]
                link = self._connect(
                    cluster_id, self._socket_addresses.towards(host, port), deadline_s
                )
            try:
                self._check_role(cluster_id, link, cluster.remote_role_type, deadline_s)
            except BaseException:
                if link.is_client:
                    self._forget(link)
                    link.unlink(0, force=True)
                raise
            with self._lock:
                now = self._peers.get(cluster_id)
                if now is not None and now.link is link:
                    now.is_wanted = True

    @contextmanager
    def _alone(self, cluster_id: int, *, to_link: bool = False) -> Iterator[Peer | None]:
        """Yield the peer or None; no other thread can link or unlink it in this context.

        Raises `LLM_PROCESSING_LINK`. With `to_link`, also raises if a link is not allowed.
        """
        with self._lock:
            if cluster_id in self._in_progress:
                raise failure(
                    LLMStatusCode.LLM_PROCESSING_LINK,
                    f"another thread links or unlinks cluster {cluster_id}",
                )
            peer = self._peers.get(cluster_id)
            if to_link:
                self._refuse_link(cluster_id, peer)
            self._in_progress.add(cluster_id)
        try:
            yield peer
        finally:
            with self._lock:
                self._in_progress.discard(cluster_id)

    def _refuse_link(self, cluster_id: int, peer: Peer | None) -> None:
        if peer is not None and peer.is_linked:
            if peer.is_wanted:
                raise failure(LLMStatusCode.LLM_ALREADY_LINK, f"cluster {cluster_id} is linked")
            return
        linked = sum(one.is_linked for one in self._peers.values())
        if linked + len(self._in_progress) >= MOST_LINKS:
            raise failure(
                LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
                f"{MOST_LINKS} clusters are linked; unlink some",
            )

    def _connect(self, cluster_id: int, sockets: list[Address], deadline_s: float) -> Link:
        """Link with the cluster at the first of its addresses at which a process listens."""
        for address in sockets:
            left = left_s(deadline_s)
            try:
                return self._node.link_with(cluster_id, address, left)
            except ChannelClosedError:
                continue
            except ConfigError as error:
                raise failure(LLMStatusCode.LLM_LINK_FAILED, str(error)) from error
        why = self._socket_addresses.why_unreachable(sockets)
        raise failure(LLMStatusCode.LLM_LINK_FAILED, f"cluster {cluster_id}: {why}")

    def _check_role(
        self, cluster_id: int, link: Link, wanted: LLMRole | None, deadline_s: float
    ) -> None:
        role = Peer(cluster_id, link).ask(wire.Who(), wire.Told, left_s(deadline_s)).number
        if wanted not in {None, role}:
            raise failure(LLMStatusCode.LLM_LINK_FAILED, f"cluster {cluster_id} is no {wanted!s}")

    def unlink(self, cluster_id: int, deadline_s: float, *, force: bool) -> None:
        """End a link. With `force`, do not notify the peer; the link may have ended already.

        Raises `LLMException`, also if the peer does not reply; this side has ended in that case.
        """
        with self._alone(cluster_id) as peer:
            if peer is None:
                if force:
                    return  # there is nothing on this side
                raise not_linked(cluster_id)
            force = force or not peer.is_linked  # without a link there is no peer to notify
            if not force and not peer.close(deadline_s):
                raise busy(cluster_id)
            self._forget(peer.link)
            try:
                peer.link.unlink(0 if force else left_s(deadline_s), force=force)
            except ChannelClosedError:  # the peer ended it first or has exited
                peer.link.unlink(0, force=True)
            except KvelasticError as error:
                peer.link.unlink(0, force=True)
                raise failure(
                    LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED,
                    f"cluster {cluster_id} was not told: {error}; unlink it there, too",
                ) from error

    def check(self, cluster_id: int) -> None:
        """Raise unless the peer replies within the timeout of a call."""
        with self.call(cluster_id) as call:
            if call.peer.calls > 1:
                raise busy(cluster_id)
            call.peer.link.check(call.left_s())

    # --- all members link --------------------------------------------------------------------

    def link_group(self, group: Group, total_s: float, rounds: int) -> int:
        """Start to link a group's members; return the group's id. Raises `LLMException`."""
        comm_id = self.groups.begin(group, total_s, rounds)
        self.has_linked = True
        return comm_id

    def _join_member(self, cluster_id: int, token: str, timeout_s: float) -> Joined:
        """Link a member of lower rank, unless it is linked, and ask whether it is in the group."""
        deadline_s = time.monotonic() + timeout_s
        is_new = False
        try:
            with self._lock:
                peer = self._peers.get(cluster_id)
            if peer is None or not peer.is_linked:
                address = self._socket_addresses.cluster(cluster_id)
                self._connect(cluster_id, [address], deadline_s)
                is_new = True
                peer = self._peer(cluster_id)
            reply = peer.ask(wire.Join(token), wire.Told, left_s(deadline_s))
            return Joined(is_new, bool(reply.number))
        except KvelasticError as error:
            _log.debug("cluster %d has not joined yet: %s", cluster_id, error)
            return Joined(is_new, False)

    def _leave_member(self, cluster_id: int) -> None:
        """Unlink a cluster that is no longer in any group."""
        try:
            self.unlink(cluster_id, time.monotonic() + self._options.sync_kv_timeout_s, force=False)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:  # the peer ended it first
                raise

    # --- calls of managers -------------------------------------------------------------------

    @contextmanager
    def call(self, cluster_id: int, *, is_layered: bool = False) -> Iterator[LinkCall]:
        """Run a call to a peer; a timeout breaks the link, because late replies match no call.

        Raises `LLM_NOT_YET_LINK`, `LLM_WAIT_PROCESS_TIMEOUT` for a link broken by a timeout, and
        `LLM_LINK_BUSY` if a layered transfer and another call would use the link together.
        """
        peer = self._peer(cluster_id)
        with peer.used(is_layered=is_layered), as_llm_exceptions(f"cluster {cluster_id}"):
            deadline_s = time.monotonic() + self._options.sync_kv_timeout_s
            try:
                yield LinkCall(peer, self._node, self._caches, deadline_s)
            except ChannelTimeoutError as error:
                peer.break_off()
                raise failure(
                    LLMStatusCode.LLM_TIMEOUT,
                    f"cluster {cluster_id} was not done within sync_kv_timeout; link it again",
                ) from error

    def _peer(self, cluster_id: int) -> Peer:
        with self._lock:
            peer = self._peers.get(cluster_id)
        if peer is None:
            raise not_linked(cluster_id)
        return peer

    # --- callbacks of the node ---------------------------------------------------------------

    def _linked(self, link: Link) -> None:
        """Record a new link, made by either side. Called in any thread."""
        with self._lock:
            self._peers[link.peer_id] = Peer(link.peer_id, link)

    def _ended(self, link: Link) -> None:
        """Record the end of a link: forget an unlinked peer, mark a lost peer as broken."""
        with self._lock:
            peer = self._peers.get(link.peer_id)
            if peer is None or peer.link is not link:
                return
            if link.ended is None and peer.broken is None:
                del self._peers[link.peer_id]
            elif peer.broken is None:
                peer.broken = LLMStatusCode.LLM_LINK_FAILED
                # If two links cross, one of them ends.
                is_crossed = link.peer_id in self._in_progress
                level = logging.DEBUG if is_crossed else logging.WARNING
                _log.log(level, "cluster %d has gone: %s", link.peer_id, link.ended)

    def _forget(self, link: Link) -> None:
        with self._lock:
            peer = self._peers.get(link.peer_id)
            if peer is not None and peer.link is link:
                del self._peers[link.peer_id]

    def _answer(self, link: Link, body: bytes) -> bytes:
        """Return the reply to a peer's request. Called in a thread of the node."""
        try:
            return wire.PROTOCOL.encode(self._answered(link, wire.PROTOCOL.decode(body)))
        except KvelasticError as error:
            return wire.PROTOCOL.encode(wire.Refused(int(status_of(error)), str(error)[:2048]))

    def _answered(self, link: Link, asked: Message) -> Message:
        match asked:
            case wire.Find():
                return self._found(asked)
            case wire.Moved():
                tensors = range(asked.first_tensor, asked.first_tensor + asked.tensors)
                self._caches.moved(asked.cache_id, asked.row, tensors)
                return wire.Told(0)
            case wire.Who():
                return wire.Told(int(self._role))
            case wire.Join():
                return wire.Told(int(self.groups.joined(link.peer_id, asked.token)))
            case _:
                raise MessageError(f"a {type(asked).__name__} is no question")

    def _found(self, asked: wire.Find) -> wire.Cache:
        entry, row = self._caches.of_key(Index(asked.kind, asked.value, asked.detail))
        if row >= entry.desc.batch_size:
            raise LLMParamError(f"the cache has {entry.desc.batch_size} rows, and no row {row}")
        if not entry.remote_accessible:
            raise LLMParamError(f"cache {entry.cache_id} is registered for this cluster alone")
        if asked.is_write and not self._options.remembers_remote_caches:
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                "this cluster lets nobody push; set enable_remote_cache_accessible here, too",
            )
        return wire.Cache(entry.cache_id, entry.is_blocks, row, entry.desc, entry.addrs)

    # --- role and end ------------------------------------------------------------------------

    def switch_role(self, role: LLMRole, listen: tuple[tuple[str, int], ...]) -> None:
        """Change the role and listen at the given addresses only.

        Raises `LLM_EXIST_LINK` while links exist, `LLM_FAILED` if an address is unavailable, and
        `ConfigError` if the settings forbid it. After an error it has the previous role, and
        listens at the previous addresses.
        """
        with self._lock:
            linked = [one.cluster_id for one in self._peers.values() if one.is_linked]
            if linked or self._in_progress:
                raise failure(
                    LLMStatusCode.LLM_EXIST_LINK, f"clusters {linked} are linked; unlink them first"
                )
            self._peers.clear()
        before, before_role = self._node.addresses, self._role
        self._node.close()
        self._role = role
        try:
            self._node = self._listen(listen)
        except BaseException as error:
            self._role = before_role
            self._node = self._open_node(list(before))
            if isinstance(error, ChannelError):
                raise failure(LLMStatusCode.LLM_FAILED, str(error)) from error
            raise

    def close(self) -> None:
        """End all links. Idempotent."""
        self.groups.close()
        with self._lock:
            self._peers.clear()
        self._node.close()


def not_linked(cluster_id: int) -> LLMException:
    """Return the exception for a cluster that is not linked."""
    return failure(LLMStatusCode.LLM_NOT_YET_LINK, f"cluster {cluster_id} is not linked")
