"""The connector's scheduler side: matches, launches and tracks tasks.

    waiting request     get_num_new_matched_tokens   matched, cancelled unless the next two follow
                        update_state_after_alloc     its blocks are known
    every step          build_connector_meta         cancel unused matches, launch the others
                        update_connector_output      report ended tasks and release their blocks
    finished request    request_finished             matched for a put; its blocks stay until then

A missing or failing server counts as a miss; it never fails a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    EngineError,
    KvelasticError,
    NotInitializedError,
)
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.stats import FlexKVStats
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server.utils import remove_dead_endpoints

_log = logging.getLogger("kvelastic.flexkv")
_READY_S: Final = 600.0
_LOOK_S: Final = 0.05
_SAY_EVERY_S: Final = 10.0
_AWAY_S: Final = 5.0
"""How long a missing or silent server is not called again."""
_UNREADY: Final = KVResponseStatus.UNREADY


@dataclass
class _Task:
    """One task of one request."""

    task_id: int
    kind: Literal["get", "put"]
    request: Any
    tokens: int
    """Number of tokens to copy, from `skipped` on."""
    skipped: int
    block_ids: list[int] = field(default_factory=list)
    state: Literal["matched", "bound", "running", "failing"] = "matched"
    """`bound`: its blocks are known. `failing`: until a worker's output names its blocks."""


class FlexKVSchedulerConnector:
    """Not thread-safe: vLLM's scheduler calls it."""

    def __init__(self, config: FlexKVConfig, dp_rank: int) -> None:
        """Start a KVManager and wait for the engine's ranks. Blocks.

        Raises `EngineError` if the ranks do not register, and errors of `KVManager`.
        """
        self._block_size = config.cache_config.tokens_per_block
        self._stats = FlexKVStats(config.user_config.value("num_log_interval_requests"))
        self._tasks: dict[int, _Task] = {}
        self._failed_blocks: set[int] = set()
        """Blocks of failed loads that no worker knows of."""
        self._to_cancel: set[int] = set()
        """Tasks to cancel. An id stays until the server has replied to its cancel."""
        self._away_until_s = self._silent_until_s = 0.0
        self._manager = KVManager(
            config.model_config,
            config.cache_config,
            gpu_register_port=config.gpu_register_port,
            server_recv_port=config.server_recv_port,
            dp_client_id=config.dp_client_id_of_instance + dp_rank,
        )
        try:
            remove_dead_endpoints()
            self._manager.start()
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _wait_until_ready(self) -> None:
        began_s = said_s = time.monotonic()
        while not self._manager.is_ready():
            now_s = time.monotonic()
            if now_s - began_s > _READY_S:
                raise EngineError(
                    f"the workers' KV caches were not registered within {_READY_S:.0f} s; their log"
                    " says why"
                )
            if now_s - said_s > _SAY_EVERY_S:
                said_s = now_s
                _log.info("Waiting for the workers' KV caches.")
            time.sleep(_LOOK_S)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens in tiers after the computed ones, and if loads are async."""
        found = self._get_match(request, num_computed_tokens)
        self._stats.record_get(
            num_prompt_tokens=request.num_tokens,
            num_gpu_matched_tokens=num_computed_tokens,
            num_flexkv_matched_tokens=found,
        )
        return found, found > 0

    def _get_match(self, request: Any, computed: int) -> int:
        tokens = self._tokens(request, request.num_tokens)
        if tokens is None or tokens.size <= computed:
            return 0
        mask = np.ones(tokens.size, np.bool_)
        mask[:computed] = False
        task = self._match("get", request, tokens, mask)
        return 0 if task is None else task.tokens

    def _match(
        self, kind: Literal["get", "put"], request: Any, tokens: Any, mask: Any = None
    ) -> _Task | None:
        """Keep a task that has something to copy; cancel any other task and return None."""
        match = self._manager.get_match if kind == "get" else self._manager.put_match
        matched = self._try(lambda: match(tokens, mask, namespace=_namespace(request)))
        if matched is None:
            return None
        task_id, found = matched
        if not found.any():
            self._cancel([task_id])
            return None
        task = _Task(task_id, kind, request, int(np.count_nonzero(found)), int(found.argmax()))
        self._tasks[task_id] = task
        return task

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Set the target blocks of a load."""
        if num_external_tokens == 0:
            return
        for task in self._in("matched"):
            if task.request.request_id == request.request_id:
                self._bind(task, blocks.get_block_ids()[0])
                return
        raise EngineError(f"vLLM loads for {request.request_id}, which was not matched")

    def _bind(self, task: _Task, block_ids: list[int]) -> None:
        first = task.skipped // self._block_size
        task.block_ids = list(block_ids[first : first + task.tokens // self._block_size])
        task.state = "bound"

    def _in(self, state: str) -> list[_Task]:
        return [task for task in self._tasks.values() if task.state == state]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Start to store a finished request's blocks; return whether they are still needed.

        `update_connector_output` releases them.
        """
        return self._store(request, block_ids), None

    def _store(self, request: Any, block_ids: list[int]) -> bool:
        if any(task.request.request_id == request.request_id for task in self._tasks.values()):
            return True
        if not _ended_well(request):
            return False
        # The last token was sampled, but its KV was not computed.
        known = min(request.num_tokens - 1, request.num_computed_tokens)
        tokens = self._tokens(request, min(known, len(block_ids) * self._block_size))
        if tokens is None or tokens.size == 0:
            return False
        task = self._match("put", request, tokens)
        found = 0 if task is None else task.tokens
        self._stats.record_put(num_all_tokens=request.num_tokens, num_unmatched_tokens=found)
        if task is not None:
            self._bind(task, block_ids)
        return task is not None

    def launch(self) -> None:
        """Cancel the matches that vLLM did not use, and launch the others."""
        unused = [task.task_id for task in self._in("matched")]
        for task_id in unused:
            del self._tasks[task_id]
        self._cancel(unused)
        tasks = self._in("bound")
        for task in tasks:
            task.state = "running"
        if tasks:
            ids, slots = [task.task_id for task in tasks], [self._slots(task) for task in tasks]
            self._try(lambda: self._manager.launch(ids, slots))

    def _cancel(self, task_ids: Iterable[int]) -> None:
        """Cancel tasks, and those whose earlier cancel failed."""
        self._to_cancel |= set(task_ids)
        if self._to_cancel:
            self._try(self._send_cancel)

    def _send_cancel(self) -> None:
        self._manager.cancel(self._to_cancel)
        self._to_cancel.clear()

    def _slots(self, task: _Task) -> np.ndarray[Any, np.dtype[np.int64]]:
        starts = np.asarray(task.block_ids, np.int64) * self._block_size
        return (starts[:, None] + np.arange(self._block_size)).reshape(-1)

    def update_connector_output(self, output: Any) -> None:
        """Add the ended tasks to a step's output.

        A failed load is added once the worker's output names its blocks.
        """
        sent, received = set(output.finished_sending or ()), set(output.finished_recving or ())
        for task_id, is_whole in self._over().items():
            task = self._tasks.pop(task_id)
            if task.kind == "put":
                sent.add(task.request.request_id)
            elif is_whole:
                received.add(task.request.request_id)
            else:
                task.state = "failing"
                self._tasks[task_id] = task
                self._failed_blocks |= set(task.block_ids)
            if not is_whole:
                self._stats.record_failed(1)
                _log.warning("A %s of %d tokens failed.", task.kind, task.tokens)
        for task in self._in("failing"):
            if set(task.block_ids) <= set(output.invalid_block_ids or ()):
                received.add(task.request.request_id)
                del self._tasks[task.task_id]
        output.finished_sending, output.finished_recving = sent, received

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of failed loads, each once: later they may be another request's."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def _over(self) -> dict[int, bool]:
        """Return the ended tasks, and for each whether all blocks were copied."""
        running = [task.task_id for task in self._in("running")]
        if not running or time.monotonic() < self._silent_until_s:
            return {}
        try:
            found = self._manager.try_wait(running)
        except (ChannelClosedError, NotInitializedError):
            # A server that has ended copies nothing further.
            return dict.fromkeys(running, False)
        except ChannelError as error:
            # A server that does not reply may still copy.
            self._away_until_s = self._silent_until_s = time.monotonic() + _AWAY_S
            _log.warning("%d requests wait for their copies: %s.", len(running), error)
            return {}
        unready = [one for one, answer in found.items() if answer.status is _UNREADY]
        if unready:  # its launch was refused
            self._cancel(unready)
        return {
            task_id: response.status is KVResponseStatus.SUCCESS
            for task_id, response in found.items()
            if task_id in self._tasks and task_id not in self._to_cancel
        }

    def take_events(self) -> tuple[()]:
        """Return no events: vLLM reports its cache's events itself."""
        return ()

    def get_kv_connector_stats(self) -> None:
        """Return no statistics: they are logged."""

    def shutdown(self) -> None:
        """Cancel tasks and close the manager. Idempotent."""
        self._manager.shutdown()

    def _tokens(self, request: Any, count: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the first whole blocks of tokens; None for prompts with more than tokens."""
        has_embeddings = getattr(request, "prompt_embeds", None) is not None
        if has_embeddings or getattr(request, "mm_features", None):
            return None
        whole = count - count % self._block_size
        return np.asarray(request.all_token_ids[:whole], np.int64)

    def _try(self, call: Any) -> Any:
        """Make a call; return None if the server is missing or refuses."""
        if time.monotonic() < self._away_until_s:
            return None
        try:
            return call()
        except (ChannelError, NotInitializedError) as error:
            self._away_until_s = time.monotonic() + _AWAY_S
            _log.warning("Nothing is kept or found for now: %s.", error)
            self._manager.reconnect()
        except KvelasticError as error:
            _log.warning("Not kept or not found: %s.", error)
        return None


def _ended_well(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _namespace(request: Any) -> list[str] | None:
    """Return the LoRA, the salt and the request's own namespace, which keep blocks separate."""
    names: list[str] = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        names += ["lora", str(lora.lora_name), str(lora.lora_path)]
    salt = getattr(request, "cache_salt", None)
    if salt is not None:
        names += ["salt", str(salt)]
    own = getattr(request, "namespace_info", None)
    if own is not None:
        names += [str(one) for one in (own if isinstance(own, list) else [own])]
    return names or None
