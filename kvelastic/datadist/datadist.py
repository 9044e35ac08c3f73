"""`LLMDataDist`: a cluster of this process, its links and its manager.

datadist = LLMDataDist(LLMRole.DECODER, cluster_id=2)
datadist.init(config.generate_options())
status, each = datadist.link_clusters([cluster])
datadist.cache_manager.pull_cache(...)
datadist.finalize()
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvelastic.config import configure_logging, load
from kvelastic.datadist import checks
from kvelastic.datadist.cache_manager import CacheManager
from kvelastic.datadist.clusters import LLMClusterInfo
from kvelastic.datadist.enums import LLMRole, RegisterMemStatus
from kvelastic.datadist.kv_cache_manager import KvCacheManager
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.options import Options, listen_option, read_options
from kvelastic.datadist.rank_table import parse_group
from kvelastic.datadist.status import (
    LLMParamError,
    LLMStatusCode,
    as_llm_exceptions,
    failure,
    status_of,
)
from kvelastic.errors import ChannelError, KvelasticError, NotInitializedError

_log = logging.getLogger("kvelastic")

MAX_CLUSTERS_A_CALL: Final = 16
DEFAULT_LINK_TIMEOUT_MS: Final = 3000
MAX_COMM_NAME: Final = 127

_live_lock = threading.Lock()
_live: LLMDataDist | None = None


class LLMDataDist:
    """A cluster. `init` it, `finalize` it; one a process is initialized at a time.

    Which generation it is `init` decides: with `enable_cache_manager`, or `local_comm_res`, there
    are `cache_manager`, `link`, `unlink` and `query_register_mem_status`; without, there are
    `kv_cache_manager` and `check_link_status`. Those of the other raise `LLM_PARAM_INVALID`.

    Calls may come from any thread; `finalize` and `switch_role` not beside others.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        """`cluster_id` is unique among all that link. Raises `TypeError`, `LLMParamError`."""
        self._role = checks.instance("role", role, LLMRole)
        self._cluster_id = checks.integer("cluster_id", cluster_id)
        self._options: Options | None = None
        self._pid = os.getpid()

    def init(self, options: dict[str, str]) -> None:
        """Make it ready: join the ledgers, listen. A second call changes nothing.

        `options` are those of `LLMConfig.generate_options`. Raises `TypeError`, `LLMParamError`;
        `LLM_FAILED` where another one of this process is initialized, an address is taken or a
        pool cannot be opened. Nothing is left behind then.
        """
        global _live
        with _live_lock:
            if self._options is not None:
                return
            asked = read_options(options, self._role)
            if _live is not None:
                raise failure(
                    LLMStatusCode.LLM_FAILED,
                    f"cluster {_live._cluster_id} of this process is initialized; finalize it",
                )
            self._open(asked)
            _live = self
            self._options = asked
            atexit.register(self._finalize_at_exit)

    def _open(self, options: Options) -> None:
        with as_llm_exceptions("init"):
            settings = load()
            configure_logging(settings)
            self._caches = LocalCaches(options, settings)
            try:
                self._links = Links(self._cluster_id, self._role, self._caches, options, settings)
            except BaseException as error:
                self._caches.close()
                if isinstance(error, ChannelError):  # no link is involved yet
                    raise failure(LLMStatusCode.LLM_FAILED, f"init: {error}") from error
                raise
        self._first = KvCacheManager(self._caches, self._links, options, self._role)
        self._second = CacheManager(self._caches, self._links, options)
        self._pid = os.getpid()

    def finalize(self) -> None:
        """Close links and listeners, end layered transfers, give all memory back. Repeatable."""
        global _live
        with _live_lock:
            if self._options is None or os.getpid() != self._pid:
                return
            self._options = None
            _live = None
            atexit.unregister(self._finalize_at_exit)
            self._first.finalize()
            self._second.finalize()
            try:
                self._links.close()
            finally:
                self._caches.close()

    def _finalize_at_exit(self) -> None:
        if os.getpid() == self._pid:  # what a forked child inherits is not its own
            self.finalize()

    @property
    def cluster_id(self) -> int:
        """Its id."""
        return self._cluster_id

    # --- managers ----------------------------------------------------------------------------

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager of the first generation."""
        self._required(second=False, call="kv_cache_manager")
        return self._first

    @property
    def cache_manager(self) -> CacheManager:
        """The manager of the second generation."""
        self._required(second=True, call="cache_manager")
        return self._second

    # --- links that one side makes -----------------------------------------------------------

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = DEFAULT_LINK_TIMEOUT_MS
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link with peers that listen, 16 at most, all at once, within `timeout` milliseconds.

        Returns the first failure, or `LLM_SUCCESS`, and a code for each: `LLM_ALREADY_LINK` (this
        side has linked it before; a link that the peer has made is a success),
        `LLM_PROCESSING_LINK` (another thread links or unlinks it), `LLM_LINK_FAILED`,
        `LLM_TIMEOUT`, `LLM_CLUSTER_NUM_EXCEED_LIMIT` (over 16 in a call, over 512 in all).
        In the first generation a PROMPT does not link (`LLM_PARAM_INVALID`). Raises `TypeError`,
        `LLMParamError`.
        """
        options = self._required()
        found = _checked(clusters, needs_address=True)
        deadline_s = _deadline(timeout)
        if not options.is_cache_manager and self._role is LLMRole.PROMPT:
            refused = LLMStatusCode.LLM_PARAM_INVALID
            return refused, [refused] * len(found)
        return _for_each(found, lambda cluster: self._links.link(cluster, deadline_s))

    def unlink_clusters(
        self,
        clusters: Sequence[LLMClusterInfo],
        timeout: int = DEFAULT_LINK_TIMEOUT_MS,
        force: bool = False,
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links; the peers are told, unless `force`, which ends this side's only.

        Returns as `link_clusters`: `LLM_NOT_YET_LINK` (not with `force`),
        `LLM_NOTIFY_PROMPT_UNLINK_FAILED` (this side's end is gone, the peer did not answer: it has
        to unlink, too), `LLM_LINK_BUSY` where transfers still use the link at the end of `timeout`.
        """
        self._required()
        found = _checked(clusters, needs_address=False)
        deadline_s = _deadline(timeout)
        checks.flag("force", force)

        def unlink(cluster: LLMClusterInfo) -> None:
            assert cluster.remote_cluster_id is not None
            self._links.unlink(cluster.remote_cluster_id, deadline_s, force=force)

        return _for_each(found, unlink)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Return if the peer answers within `sync_kv_timeout`. Of the first generation's DECODER.

        Raises `LLM_NOT_YET_LINK`, `LLM_LINK_BUSY` while a transfer uses the link, `LLM_TIMEOUT`
        and `LLM_LINK_FAILED`, after which it has to be made again.
        """
        self._required(second=False, call="check_link_status")
        checks.integer("remote_cluster_id", remote_cluster_id)
        if self._role is LLMRole.PROMPT:
            raise LLMParamError("check_link_status is of a DECODER, and this is a PROMPT")
        with as_llm_exceptions("check_link_status"):
            self._links.check(remote_cluster_id)

    # --- links that all members make ---------------------------------------------------------

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link 2 to 4 clusters with one another; all of them call it, with the same arguments.

        Answers the id of the group at once: `query_register_mem_status` says when it is there.
        `cluster_rank_info` has the rank of each cluster, `rank_table` (JSON) the host of each rank.
        Raises `TypeError`, `LLMParamError`, `LLM_ALREADY_LINK` for a name that is in use.
        """
        options = self._required(second=True, call="link")
        group = parse_group(self._cluster_id, comm_name, cluster_rank_info, rank_table)
        with as_llm_exceptions("link"):
            return self._links.link_group(group, options.link_total_s, options.link_rounds)

    def unlink(self, comm_id: int) -> None:
        """End a group's links. Raises `LLM_NOT_YET_LINK` for an id that is not in use."""
        self._required(second=True, call="unlink")
        checks.integer("comm_id", comm_id, most=checks.MAX_INT64)
        with as_llm_exceptions("unlink"):
            self._links.groups.end(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """OK: the group's members reach one another's caches. PREPARING, FAILED. Never blocks."""
        self._required(second=True, call="query_register_mem_status")
        checks.integer("comm_id", comm_id, most=checks.MAX_INT64)
        with as_llm_exceptions("query_register_mem_status"):
            return self._links.groups.status(comm_id)

    # --- role --------------------------------------------------------------------------------

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role, and listen at `switch_options["llm.listenIpInfo"]`, or nowhere.

        Raises `LLM_EXIST_LINK` while there are links, `LLM_FAILED` for an address that is taken,
        `LLM_PARAM_INVALID` with several devices. In the first generation also
        `LLM_FEATURE_NOT_ENABLED` without `enable_switch_role`, and `LLM_PARAM_INVALID` for the same
        role or a PROMPT that listens nowhere. Nothing has changed then.
        """
        options = self._required()
        checks.instance("role", role, LLMRole)
        given = {} if switch_options is None else switch_options
        listen = listen_option(checks.instance("switch_options", given, dict))
        if not options.is_cache_manager and not options.may_switch_role:
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                "switch_role needs enable_switch_role; set it before init",
            )
        if len(options.device_ids) > 1 or len(listen) > 1:
            raise LLMParamError("switch_role is not for a process with several devices")
        if not options.is_cache_manager:
            if role is self._role:
                raise LLMParamError(f"this is a {role.name} already")
            if role is LLMRole.PROMPT and not listen:
                raise LLMParamError('a PROMPT needs switch_options["llm.listenIpInfo"]')
        with as_llm_exceptions("switch_role"):
            self._links.switch_role(role, listen)
        self._role = role
        self._first.switch_role(role)

    def _required(self, *, second: bool | None = None, call: str = "") -> Options:
        if self._options is None:
            raise NotInitializedError("LLMDataDist is not initialized; call init() first")
        if second is not None and second is not self._options.is_cache_manager:
            raise LLMParamError(
                f"{call} is {'not there without' if second else 'not there with'}"
                " enable_cache_manager"
            )
        return self._options


def _deadline(timeout: int) -> float:
    return time.monotonic() + checks.integer("timeout", timeout, least=1, most=(1 << 31) - 1) / 1000


def _checked(clusters: Sequence[LLMClusterInfo], *, needs_address: bool) -> list[LLMClusterInfo]:
    found = checks.instances("clusters", clusters, LLMClusterInfo)
    if not found:
        raise LLMParamError("clusters is empty; name at least one")
    for at, cluster in enumerate(found):
        if cluster.remote_cluster_id is None:
            raise LLMParamError(f"clusters[{at}] has no remote_cluster_id")
        if needs_address and not cluster.remote_ip_infos:
            raise LLMParamError(f"clusters[{at}] has no address; call append_remote_ip_info")
    return found


def _for_each(
    clusters: Sequence[LLMClusterInfo], act: Callable[[LLMClusterInfo], None]
) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    """Act on all of them at once; the first failure, and what came of each."""
    if len(clusters) > MAX_CLUSTERS_A_CALL:
        refused = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        return refused, [refused] * len(clusters)

    def status(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            act(cluster)
        except KvelasticError as error:
            _log.warning("cluster %s: %s", cluster.remote_cluster_id, error)
            return status_of(error)
        return LLMStatusCode.LLM_SUCCESS

    with ThreadPoolExecutor(len(clusters), "kvelastic-links") as each:
        found = list(each.map(status, clusters))
    failed = (one for one in found if one is not LLMStatusCode.LLM_SUCCESS)
    return next(failed, LLMStatusCode.LLM_SUCCESS), found
