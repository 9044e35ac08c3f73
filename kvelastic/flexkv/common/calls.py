"""FlexKV's calls. Each call is one message, which an engine runs and a client sends.

    KVManager.get_match(...)  ->  Match  ->  KVTaskEngine.ask              in this process
                                         ->  KVDPClient.ask  ==>  KVServer: KVTaskEngine.ask

Arguments are checked when the message is created, so a server and a local engine refuse the same
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.arguments import (
    MOST_TASKS,
    MOST_TOKENS,
    as_mask,
    launched,
    request_tokens,
    task_id_list,
    wait_seconds,
)
from kvelastic.flexkv.common.hash_utils import (
    MOST_NAME_CHARACTERS,
    MOST_NAMES,
    Tokens,
    namespace_names,
)
from kvelastic.flexkv.common.request import KVResponse, Mask
from kvelastic.messages import Message, Meta

ALL_LAYERS: Final = -1
WAIT_S: Final = 20.0
_NO_SLOTS: Final = object()

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
TaskIds = Annotated[list[int], Meta(max_length=MOST_TASKS)]
Name = Annotated[str, Meta(max_length=MOST_NAME_CHARACTERS)]
Namespace = Annotated[list[Name], Meta(max_length=MOST_NAMES)]


class Match(Message):
    """The message of all matches; with `slots` and for a prefetch, it also launches the task."""

    kind: Literal["get", "put", "prefetch"]
    tokens: Tokens
    mask: Mask | None
    namespace: Namespace | None
    slots: Tokens | None = None
    cpu_only: bool = False


class Matched(Message):
    """A task, and the span of `count` tokens for which its mask is True."""

    task_id: int
    count: Count
    start: Count
    stop: Count

    @property
    def mask(self) -> Mask:
        """Return the span as a mask."""
        mask = np.zeros(self.count, np.bool_)
        mask[self.start : self.stop] = True
        return mask


class Launch(Message):
    """The message of launch: slots for each task."""

    task_ids: TaskIds
    slots: Annotated[list[Tokens], Meta(max_length=MOST_TASKS)]
    as_batch: bool


class Started(Message):
    """The ids to wait for."""

    task_ids: TaskIds


class Cancel(Message):
    """The message of cancel."""

    task_ids: TaskIds


class Wait(Message):
    """The message of wait; with `timeout_s` None, of try_wait."""

    task_ids: TaskIds
    timeout_s: Annotated[float, Meta(ge=0, le=1e9)] | None
    completely: bool


class Reset(Message):
    """The message of reset."""


class Done(Message):
    """The reply to a call without result."""


class Calls(ABC):
    """FlexKV's calls of a KVManager, a KVTaskEngine and a KVDPClient. Any thread may call."""

    dp_client_id: int = 0

    @abstractmethod
    def ask(self, call: Message, dp_id: int = 0) -> Any:
        """Run a call for a data-parallel client, here or in a server.

        Returns Matched for Match, Started for Launch, a KVResponse for each task for Wait, and Done
        for Cancel and Reset.
        """

    def get_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        layer_granularity: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        cpu_only: bool = False,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """Find the longest prefix in the tiers. Returns (task id, mask).

        The mask is True for one run of whole blocks, which starts at the block of the first True
        token of `token_mask` (None: all True). The blocks are held until the task has ended: launch
        or cancel it. `cpu_only` searches the CPU tier only. `token_ids` is a 1-D int64 array of
        NumPy, or of torch on the CPU. `namespace` separates tenants. Raises `InvalidArgumentError`,
        and `UnsupportedError` for a `layer_granularity` other than -1.
        """
        check_layers(ALL_LAYERS, layer_granularity)
        refuse_sliding(swa_aware=swa_aware)
        return self._match("get", token_ids, token_mask, dp_id, namespace, cpu_only=cpu_only)

    def put_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[int, Mask]:
        """Find what the CPU tier lacks, and reserve space for it. Returns (task id, mask).

        The mask is True from the first block that is neither present nor in progress to the last
        whole block. If they do not all fit, it is False everywhere. `token_mask` must be True from
        the first token on. Launch or cancel the task. Raises `InvalidArgumentError`.
        """
        return self._match("put", token_ids, token_mask, dp_id, namespace)

    def get_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        layer_granularity: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """Match and launch in one call. Returns the task id; `KVResponse.return_mask` is the mask.

        `slot_mapping` has a slot for each True token of `token_mask`. Slots of tokens that are not
        found keep their contents.
        """
        check_layers(ALL_LAYERS, layer_granularity)
        return self._match("get", token_ids, token_mask, dp_id, namespace, slot_mapping)[0]

    def put_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """Match for a put and launch in one call. Otherwise as `get_async`."""
        return self._match("put", token_ids, token_mask, dp_id, namespace, slot_mapping)[0]

    def prefetch_async(
        self, token_ids: Any, namespace: Sequence[str] | None = None, swa_aware: bool = False
    ) -> int:
        """Copy blocks that only a farther tier has into the CPU tier. Returns the task id.

        Its response comes when all copies have ended. The mask shows what the CPU tier has then.
        """
        refuse_sliding(swa_aware=swa_aware)
        return self._match("prefetch", token_ids, None, 0, namespace)[0]

    def launch(
        self,
        task_ids: int | Iterable[int],
        slot_mappings: Any,
        swa_slot_mappings: Any = None,
        as_batch: bool = False,
        layerwise_transfer: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """Start tasks: all of them, or none if one is refused. Returns the ids to wait for.

        A slot mapping has the slots of exactly the True tokens of the task's mask, in order, in
        whole blocks of the engine: block = slot // tokens_per_block. Each token of a block may also
        have the block's first slot. A single id may come with a bare array. Tasks that found
        nothing are skipped. With `as_batch`, the tasks get one common id. Raises
        `InvalidArgumentError` (a ValueError) for a task that was launched or has ended and for
        invalid slots, `NotInitializedError` before tensors are registered, and `UnsupportedError`
        for single layers and sliding windows. Never blocks on a copy.
        """
        refuse_sliding(swa_slot_mappings=swa_slot_mappings)
        if layerwise_transfer:
            raise UnsupportedError(
                "layerwise_transfer=True: blocks are moved in all layers at once; leave it off"
            )
        ids, slots = launched(task_ids, slot_mappings)
        started: list[int] = self.ask(
            Launch(ids, slots, bool(as_batch)), self.dp_client_id
        ).task_ids
        return started

    def cancel(self, task_ids: int | Iterable[int]) -> None:
        """Cancel tasks. Unknown and ended ids are ignored.

        A task that was not launched releases its leases and space. A running task starts no further
        copy, and the call waits for a copy in progress. When the call returns, the caller may reuse
        the blocks. Raises `TransferError`, which names the tasks, if a copy does not end within
        five seconds. Its blocks are still in use: cancel the task again.
        """
        self.ask(Cancel(task_id_list(task_ids)), self.dp_client_id)

    def wait(
        self, task_ids: int | Iterable[int], timeout: float = WAIT_S, completely: bool = False
    ) -> dict[int, KVResponse]:
        """Wait for tasks, up to `timeout` seconds in total; return a response for each.

        The response's status is SUCCESS if the engine can continue: the blocks of a get are filled,
        the blocks of a put are copied and may be overwritten. With `completely`, and always for a
        prefetch, it also means that all writes to farther tiers have ended. FAILED means that
        blocks were not copied; the response's mask shows which were. A task that was not launched
        is UNREADY, an unknown one NOTFOUND.
        """
        call = Wait(task_id_list(task_ids), wait_seconds(timeout), bool(completely))
        found: dict[int, KVResponse] = self.ask(call, self.dp_client_id)
        return found

    def try_wait(
        self, task_ids: int | Iterable[int], completely: bool = False
    ) -> dict[int, KVResponse]:
        """Return the responses of tasks that have ended, without waiting."""
        call = Wait(task_id_list(task_ids), None, bool(completely))
        found: dict[int, KVResponse] = self.ask(call, self.dp_client_id)
        return found

    def reset(self) -> None:
        """Erase all tiers, for new weights; running tasks become CANCELLED. Blocks.

        A tier that does not respond within a minute is logged. Its old blocks are never found
        again.
        """
        self.ask(Reset(), self.dp_client_id)

    def _match(
        self,
        kind: Literal["get", "put", "prefetch"],
        token_ids: Any,
        token_mask: Any,
        dp_id: int,
        namespace: Sequence[str] | None,
        slot_mapping: Any = _NO_SLOTS,
        *,
        cpu_only: bool = False,
    ) -> tuple[int, Mask]:
        tokens = request_tokens(token_ids)
        slots = None
        if slot_mapping is not _NO_SLOTS:
            slots = request_tokens(slot_mapping, "slot_mapping")
        names, mask = namespace_names(namespace), as_mask(token_mask, len(tokens))
        call = Match(kind, tokens, mask, names, slots, bool(cpu_only))
        matched: Matched = self.ask(call, dp_id or self.dp_client_id)
        return matched.task_id, matched.mask


def check_layers(layer_num: int, layer_granularity: int) -> None:
    """Raise `UnsupportedError` (a NotImplementedError) for single layers."""
    for name, value in (("layer_num", layer_num), ("layer_granularity", layer_granularity)):
        if value != ALL_LAYERS:
            raise UnsupportedError(
                f"{name}={value}: blocks are moved in all layers at once; leave it at {ALL_LAYERS}"
            )


def refuse_sliding(*, swa_aware: bool = False, swa_slot_mappings: Any = None) -> None:
    """Raise `UnsupportedError` for arguments of sliding-window layers."""
    if swa_aware or swa_slot_mappings is not None:
        raise UnsupportedError(
            "swa_aware and swa_slot_mappings: sliding-window layers with blocks of their own are"
            " not served; register the tensors of full layers, or use kvelastic's own vLLM plugin"
        )


def pack(value: Any) -> bytes:
    """Pack an array field of a message to bytes, for `Protocol`.

    A mask: the number of bits that fill the last byte, then a bit for each token. Tokens or slots:
    a byte that is 4 or 8, then little-endian integers of that size. Raises `InvalidArgumentError`
    for another array of numbers, or more than `MOST_TOKENS`.
    """
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__} is no field of a message")
    if value.dtype == np.bool_:
        return bytes([-len(value) % 8]) + np.packbits(value).tobytes()
    array = request_tokens(value)
    if array.size and array.min() >= -(1 << 31) and array.max() < 1 << 31:
        return b"\4" + array.astype("<i4").tobytes()
    return b"\x08" + array.astype("<i8").tobytes()


def unpack(kind: Any, packed: Any) -> Any:
    """Reverse `pack`. Raises `InvalidArgumentError` (a ValueError) for invalid bytes."""
    if not isinstance(packed, bytes):
        raise InvalidArgumentError(f"a {type(packed).__name__} is no array")
    first, length = packed[0] if packed else -1, len(packed) - 1
    if kind == Tokens:
        if first not in (4, 8) or length % first or length > 8 * MOST_TOKENS:
            raise InvalidArgumentError("these bytes are no array of integers")
        return np.frombuffer(packed, f"<i{first}", offset=1).astype(np.int64)
    count = 8 * length - first
    if not (0 <= first <= 7 and 0 <= count <= MOST_TOKENS):
        raise InvalidArgumentError(f"{len(packed)} bytes are no mask")
    bits = np.frombuffer(packed, np.uint8, offset=1)
    return np.unpackbits(bits, count=count).astype(np.bool_)
