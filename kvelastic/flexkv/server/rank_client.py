"""The client in an engine's rank, which shares the KV cache's memory with FlexKV's server.

The server copies blocks between that memory and the tiers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
    UnsupportedError,
    is_out_of_descriptors,
)
from kvelastic.flexkv.common import process_mappings
from kvelastic.flexkv.common.memory_handle import TensorDescription, TensorSharedHandle, describe
from kvelastic.flexkv.common.storage import KVCacheLayout, in_blocks
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.utils import socket_address
from kvelastic.flexkv.transfer.shared_blocks import DeviceSpan
from kvelastic.messages import Address, Connection, Endpoint, Request

_log = logging.getLogger("kvelastic.flexkv")
_DESCRIPTORS_AT_ONCE: Final = 16
ANSWER_S: Final = 30.0
"""Timeout for a reply that needs no copy. The server's engine may be busy."""
START_S: Final = 300.0
"""Timeout for the server's start. The first of several engines starts it, after a long load."""
_SAY_AFTER_S: Final = 10.0
_AGAIN_S: Final = 0.05


def connect_when_there(
    endpoint: Endpoint,
    address: Address,
    deadline_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> Connection:
    """Wait until a server replies at `address`, and return a connection to it.

    Polls every 50 ms, because the kernel does not report a new listener. Raises
    `ChannelTimeoutError` if no server replies by `deadline_s` (of `time.monotonic`), and
    `ChannelError` once `is_over` returns True.
    """
    say_at_s = time.monotonic() + _SAY_AFTER_S
    while True:
        try:
            return endpoint.connect(address)
        except ChannelError as error:  # noqa: PERF203  # sleeps between attempts
            if not _may_pass(error):
                raise
            if is_over():
                raise ChannelError("this client is closed") from error
            if time.monotonic() >= deadline_s:
                raise ChannelTimeoutError(
                    f"no server has come to {address}: {error}. Start it, or set"
                    " FLEXKV_SERVER_RECV_PORT to its endpoint"
                ) from error
            if time.monotonic() >= say_at_s:
                say_at_s = float("inf")
                _log.info("Waiting for a server at %s: %s.", address, error)
            time.sleep(_AGAIN_S)


def _may_pass(error: KvelasticError) -> bool:
    """Whether the same call may succeed later: the server has not refused it."""
    is_absence = isinstance(error, (ChannelClosedError, ChannelTimeoutError))
    return is_absence or is_out_of_descriptors(error)


class KVTPClient:
    """Registers a rank's KV cache at the server, and again each time the server has restarted.

    The server releases the memory after `close()` or the end of the rank's process. Only `close`
    is thread-safe.
    """

    def __init__(
        self,
        gpu_register_port: str,
        dp_client_id: int = 0,
        device_id: int = 0,
        pp_rank: int = 0,
        *,
        tp_rank: int | None = None,
    ) -> None:
        """`gpu_register_port` is the server's endpoint. Nothing is sent before a registration.

        `device_id` is the index among all ranks of the machine, `tp_rank` the index in its
        tensor-parallel group. Raises `ConfigError` for an endpoint that is not a Unix socket, and
        `InvalidArgumentError` for a `pp_rank` other than 0.
        """
        if pp_rank != 0:
            raise InvalidArgumentError(
                f"pp_rank={pp_rank}: give each pipeline stage a KVManager of its own"
            )
        self.dp_client_id: Final = dp_client_id
        self.device_id: Final = device_id
        self._tp_rank = device_id if tp_rank is None else tp_rank
        self._is_device_id = tp_rank is None
        self._address = socket_address(gpu_register_port)
        self._memories: list[TensorSharedHandle] = []
        """A handle of each file with tensors, as a descriptor of it."""
        self._device: tuple[_vmm.Range, _vmm.CudaDriver] | None = None
        self._message: messages.RegisterTPClient | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_registered = False
        self._failure: KvelasticError | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        """Rung when the connection ends, and when exported pages are unmapped."""
        self._endpoint = Endpoint(
            messages.PROTOCOL, self._receive, on_close=lambda _: self._ring(), name="flexkv-tp"
        )
        self._thread: threading.Thread | None = None

    def register_to_server(
        self,
        kv_caches: Sequence[Any],
        kv_layout: KVCacheLayout | None = None,
        indexer_buffers: Sequence[Any] | None = None,
        indexer_layout: KVCacheLayout | None = None,
        *,
        block_axis: int | None = None,
    ) -> None:
        """Register the tensors of a KV cache whose memory is shared as files.

        `kv_caches` has one tensor for each layer, one tensor in total, or all K's and then all V's.
        The last form needs `kv_layout`, which also defines which axis counts blocks. For a layout
        that FlexKV does not have, give `block_axis` instead. Tensors indexed by token, as SGLang's,
        are viewed as the blocks of the layout.

        Returns immediately; a thread of this client waits for the server. Raises the errors of
        `TensorSharedHandle`, `InvalidArgumentError` for a second call, and `UnsupportedError` for
        `indexer_buffers`.
        """
        if indexer_buffers:
            raise UnsupportedError(
                "indexer_buffers: sparse attention's index has records of its own, which are not"
                " kept; use KVELASTIC_TIERS"
            )
        kv_caches = self._in_record_order(kv_caches, kv_layout)
        # A handle that is not kept closes its descriptor with its last reference.
        handles = [TensorSharedHandle(tensor) for tensor in kv_caches]
        described, axis = in_blocks([one.description for one in handles], kv_layout, block_axis)
        files = [_memory_of(handle) for handle in handles]
        memories = dict(zip(files, handles, strict=True))
        self._memories = list(memories.values())
        places = {file: place for place, file in enumerate(memories)}
        tensors = [(places[file], one) for file, one in zip(files, described, strict=True)]
        self._register_tensors(tensors, axis)

    def register_range(
        self,
        memory: _vmm.Range,
        driver: _vmm.CudaDriver,
        kv_caches: Sequence[Any],
        kv_layout: KVCacheLayout | None = None,
        *,
        block_axis: int | None = None,
    ) -> None:
        """Register the tensors of a KV cache in a kvelastic range on a GPU.

        The parameters are those of `register_to_server`. Pages of the range may be unmapped after
        registration. So for each copy the server requests the pages of its blocks, which must stay
        mapped until the task ends. Raises `UnsupportedError` for a range with separate pages for
        each buffer (KVELASTIC_CONTIGUOUS_LAYOUT=false), and `InvalidArgumentError` for a tensor
        outside the range or a second call.
        """
        kv_caches = self._in_record_order(kv_caches, kv_layout)
        geometry = memory.geometry
        if geometry.extents_per_page != 1:
            raise UnsupportedError(
                "a range whose buffers have pages of their own cannot be registered; leave"
                " KVELASTIC_CONTIGUOUS_LAYOUT on"
            )
        placed = [
            found._replace(offset=address - memory.address)
            for address, found in map(describe, kv_caches)
        ]
        described, axis = in_blocks(placed, kv_layout, block_axis)
        for one in described:
            one.check(memory.range_bytes)
        memory.ring_at_unmap(self._bell)
        self._device = (memory, driver)
        span = DeviceSpan(driver.uuid, geometry.page_bytes, geometry.pages)
        self._register_tensors([(0, one) for one in described], axis, span)

    def _in_record_order(
        self, kv_caches: Sequence[Any], layout: KVCacheLayout | None
    ) -> Sequence[Any]:
        if self._thread is not None:
            raise InvalidArgumentError("this client has registered; make one for each rank")
        if not kv_caches:
            raise InvalidArgumentError("a rank without tensors has nothing to register")
        return kv_caches if layout is None else layout.in_record_order(kv_caches)

    def _register_tensors(
        self,
        tensors: list[tuple[int, TensorDescription]],
        block_axis: int,
        span: DeviceSpan | None = None,
    ) -> None:
        self._message = messages.RegisterTPClient(
            self.dp_client_id, self._tp_rank, self._is_device_id, tensors, block_axis, span
        )
        self._thread = threading.Thread(
            target=self._stay_registered, name="flexkv-register", daemon=True
        )
        self._thread.start()

    def wait_until_registered(self, timeout_s: float = START_S) -> None:
        """Block until the server has registered this rank.

        Raises the error with which registration failed, or `ChannelTimeoutError` after `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_registered or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            if not self._is_registered:
                raise ChannelTimeoutError(f"nobody has taken the memory at {self._address} so far")

    def close(self) -> None:
        """End the registration and wait for the client's thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._ring()
        self._endpoint.close()
        if self._thread is not None:
            self._thread.join()
        for memory in self._memories:
            memory.close()
        with self._changed:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1

    def _ring(self) -> None:
        with self._changed:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _receive(self, request: Request) -> None:
        """Handle a request of the server. Runs in the endpoint's thread. Takes milliseconds."""
        asked = request.message
        if isinstance(asked, messages.Locate) and self._device is not None:
            self._export(request, asked, *self._device)
        elif isinstance(asked, messages.Locate) and asked.memory < len(self._memories):
            fd = self._memories[asked.memory].fd
            request.answer(messages.Located(process_mappings.locate(asked.pages, fd)))
        else:
            raise MessageError(f"this rank takes no {type(asked).__name__}")

    @staticmethod
    def _export(
        request: Request, asked: messages.Locate, memory: _vmm.Range, driver: _vmm.CudaDriver
    ) -> None:
        if len(asked.generations) != len(asked.pages):
            raise MessageError("a GPU's pages need a generation each")
        # Read before the handles. If a page is unmapped and mapped in between, the server has the
        # new handle under the old generation, and imports it once more.
        generations = memory.generations(asked.pages)
        changed = [
            page
            for page, now, before in zip(asked.pages, generations, asked.generations, strict=True)
            if now != before
        ]
        fds: list[int] = []
        try:
            for handle in memory.handles(changed[:_DESCRIPTORS_AT_ONCE]):
                fds.append(driver.export_page(handle))  # noqa: PERF401  # `finally` needs partial results
            request.answer(messages.Located(generations), descriptors=fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _stay_registered(self) -> None:
        while not self._is_closed:
            try:
                connection = connect_when_there(
                    self._endpoint, self._address, float("inf"), lambda: self._is_closed
                )
                self._register(connection)
            except KvelasticError as error:
                if _may_pass(error):  # the server ended: wait for its successor
                    time.sleep(_AGAIN_S)
                    continue
                if not self._is_closed:
                    _log.error("the server at %s refuses this rank: %s", self._address, error)
                self._settle(failure=error)
                return
            self._settle(is_registered=True)
            self._serve(connection)
            self._settle(is_registered=False)

    def _serve(self, connection: Connection) -> None:
        """Until the connection ends, report exported pages that have been unmapped."""
        while connection.is_open and not self._is_closed:
            os.eventfd_read(self._bell)
            if self._device is None:
                continue
            pages = self._device[0].take_unmapped()
            for first in range(0, len(pages), messages.MOST_PAGES):
                with contextlib.suppress(ChannelClosedError):
                    connection.notify(
                        messages.Unmapped(pages=pages[first : first + messages.MOST_PAGES])
                    )

    def _register(self, connection: Connection) -> None:
        assert self._message is not None
        try:
            for memory in self._memories:  # tensors refer to them by their index
                connection.notify(messages.AddMemory(memory.is_elastic), descriptors=[memory.fd])
            connection.call(self._message, ANSWER_S)
        except BaseException:
            connection.close()
            raise

    def _settle(
        self, *, is_registered: bool = False, failure: KvelasticError | None = None
    ) -> None:
        with self._changed:
            self._is_registered, self._failure = is_registered, failure
            self._changed.notify_all()


def _memory_of(handle: TensorSharedHandle) -> tuple[int, int, bool]:
    found = os.fstat(handle.fd)
    return found.st_dev, found.st_ino, handle.is_elastic
