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
from typing import Final, cast

from kvelastic.config import configure_logging, load
from kvelastic.datadist import checks
from kvelastic.datadist.descriptors import LLMClusterInfo
from kvelastic.datadist.enums import LLMRole, RegisterMemStatus
from kvelastic.datadist.first_generation import KvCacheManager
from kvelastic.datadist.group_links import parse_group
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.managers import CacheManager
from kvelastic.datadist.options import Options, listen_option, read_options
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

_live_lock = threading.Lock()
_live: LLMDataDist | None = None


class LLMDataDist:
    """A cluster of this process. Call `init`, later `finalize`.

    Only one can be initialized at a time in a process. `init` selects the generation. With
    `enable_cache_manager` or `local_comm_res`, `cache_manager`, `link`, `unlink` and
    `query_register_mem_status` are available. Otherwise `kv_cache_manager` and `check_link_status`
    are. Calls of the other generation raise `LLM_PARAM_INVALID`.

    Any thread may call, but do not call `finalize` or `switch_role` concurrently with other calls.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        """`cluster_id` must be unique among linked clusters.

        Raises `TypeError`, `LLMParamError`.
        """
        self._role = checks.instance("role", role, LLMRole)
        self._cluster_id = checks.integer("cluster_id", cluster_id)
        self._options: Options | None = None

    def init(self, options: dict[str, str]) -> None:
        """Join the ledgers and listen. A second call does nothing.

        `options` are those of `LLMConfig.generate_options`. Raises `TypeError`, `LLMParamError`,
        and `LLM_FAILED` if the process has another initialized cluster, an address is in use, or a
        pool cannot be opened. After an error nothing stays open.
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
        self._manager: KvCacheManager | CacheManager
        if options.is_cache_manager:
            self._manager = CacheManager(self._caches, self._links, options)
        else:
            self._manager = KvCacheManager(self._caches, self._links, options, self._role)
        self._pid = os.getpid()

    def finalize(self) -> None:
        """Close links and listeners, end layered transfers and release all memory. Idempotent."""
        global _live
        with _live_lock:
            if self._options is None or os.getpid() != self._pid:
                return
            self._options = None
            _live = None
            atexit.unregister(self._finalize_at_exit)
            self._manager.finalize()
            try:
                self._links.close()
            finally:
                self._caches.close()

    def _finalize_at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child must not close the parent's
            self.finalize()

    @property
    def cluster_id(self) -> int:
        """The id of this cluster."""
        return self._cluster_id

    # --- managers ----------------------------------------------------------------------------

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager of the first generation."""
        self._required(second=False, call="kv_cache_manager")
        return cast("KvCacheManager", self._manager)

    @property
    def cache_manager(self) -> CacheManager:
        """The manager of the second generation."""
        self._required(second=True, call="cache_manager")
        return cast("CacheManager", self._manager)

    # --- links that one side makes -----------------------------------------------------------

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = DEFAULT_LINK_TIMEOUT_MS
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link with up to 16 listening peers concurrently, within `timeout` milliseconds.

        Returns the first failure or `LLM_SUCCESS`, and a code for each cluster. Codes are
        `LLM_ALREADY_LINK` (this side has linked it before; a link that the peer made counts as
        success), `LLM_PROCESSING_LINK` (another thread is linking or unlinking it),
        `LLM_LINK_FAILED`, `LLM_TIMEOUT`, and `LLM_CLUSTER_NUM_EXCEED_LIMIT` (over 16 per call, over
        512 in total). In the first generation a PROMPT cannot link (`LLM_PARAM_INVALID`). Raises
        `TypeError`, `LLMParamError`.
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
        """End links and notify the peers. With `force`, end this side only.

        Returns as `link_clusters` does. Codes are `LLM_NOT_YET_LINK` (not with `force`),
        `LLM_NOTIFY_PROMPT_UNLINK_FAILED` (this side has ended, but the peer did not answer and must
        unlink, too), and `LLM_LINK_BUSY` if transfers still use the link when `timeout` (ms) ends.
        """
        self._required()
        found = _checked(clusters, needs_address=False)
        deadline_s = _deadline(timeout)
        checks.instance("force", force, bool)

        def unlink(cluster: LLMClusterInfo) -> None:
            assert cluster.remote_cluster_id is not None
            self._links.unlink(cluster.remote_cluster_id, deadline_s, force=force)

        return _for_each(found, unlink)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Return if the peer replies within `sync_kv_timeout`. First generation, DECODER only.

        Raises `LLM_NOT_YET_LINK`, `LLM_LINK_BUSY` while a transfer uses the link, and `LLM_TIMEOUT`
        or `LLM_LINK_FAILED`, after which the clusters must link again.
        """
        self._required(second=False, call="check_link_status")
        checks.integer("remote_cluster_id", remote_cluster_id)
        if self._role is LLMRole.PROMPT:
            raise LLMParamError("check_link_status is of a DECODER, and this is a PROMPT")
        with as_llm_exceptions("check_link_status"):
            self._links.check(remote_cluster_id)

    # --- links that all members make ---------------------------------------------------------

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link 2 to 4 clusters with each other; each calls this with the same arguments.

        Returns the group's id at once; `query_register_mem_status` reports when the links are
        ready. `cluster_rank_info` maps each cluster to its rank; `rank_table` (JSON) has the host
        of each rank. Raises `TypeError`, `LLMParamError`, and `LLM_ALREADY_LINK` for a name in use.
        """
        options = self._required(second=True, call="link")
        group = parse_group(self._cluster_id, comm_name, cluster_rank_info, rank_table)
        with as_llm_exceptions("link"):
            return self._links.link_group(group, options.link_total_s, options.link_rounds)

    def unlink(self, comm_id: int) -> None:
        """End a group's links. Raises `LLM_NOT_YET_LINK` for an unknown id."""
        self._required(second=True, call="unlink")
        checks.integer("comm_id", comm_id, most=checks.MAX_INT64)
        with as_llm_exceptions("unlink"):
            self._links.groups.end(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return a group's state; never blocks. OK: its members can access each other's caches."""
        self._required(second=True, call="query_register_mem_status")
        checks.integer("comm_id", comm_id, most=checks.MAX_INT64)
        with as_llm_exceptions("query_register_mem_status"):
            return self._links.groups.status(comm_id)

    # --- role --------------------------------------------------------------------------------

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Change the role, and listen at `switch_options["llm.listenIpInfo"]` or nowhere.

        Raises `LLM_EXIST_LINK` while links exist, `LLM_FAILED` if the address is in use, and
        `LLM_PARAM_INVALID` with several devices. In the first generation also raises
        `LLM_FEATURE_NOT_ENABLED` without `enable_switch_role`, and `LLM_PARAM_INVALID` for the
        current role or a PROMPT without an address. After an error nothing has changed.
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
        if isinstance(self._manager, KvCacheManager):
            self._manager.switch_role(role)

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
    """Call `act` for all clusters concurrently; return the first failure and each result."""
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
