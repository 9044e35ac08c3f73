"""The exceptions that kvelastic raises, in one class hierarchy.

Each class has a stable `code`, which its class line gives. It also derives from the built-in
exceptions named there, so `except ValueError` and `except kvelastic.errors.KvelasticError` both
work.

A message states what happened, with the value, and what to do next. Native code uses only the
codes, and raises through `native_error`.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from typing import ClassVar


class KvelasticError(Exception):
    """The base class. Catch it to catch every error that kvelastic raises deliberately."""

    code: ClassVar[str] = "KVELASTIC_ERROR"
    """Stable name of the error for programs; the message is for people."""

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        if code is not None:  # else the parent's
            cls.code = code


class ConfigError(KvelasticError, RuntimeError, ValueError, code="CONFIG"):
    """A `KVELASTIC_*` variable has an invalid value. Raised before any work starts."""


class InvalidArgumentError(KvelasticError, ValueError, code="INVALID_ARGUMENT"):
    """An argument (a size, a percentage, a dtype, a device) has an invalid value."""


class NotInitializedError(KvelasticError, RuntimeError, code="NOT_INITIALIZED"):
    """A call before `init_kvelastic()`, or after `shutdown_kvelastic()`."""

    def __init__(
        self,
        message: str = "kvelastic is not initialized. Call init_kvelastic() first.",
    ) -> None:
        super().__init__(message)


class LayoutError(KvelasticError, ValueError, code="LAYOUT"):
    """A block does not fit into a page, or a shape does not match its description."""


class UnsupportedError(KvelasticError, NotImplementedError, code="UNSUPPORTED"):
    """kvelastic does not support the model or layout, e.g. a hybrid model."""


class PoolExhaustedError(KvelasticError, ValueError, code="POOL_EXHAUSTED"):
    """`Cannot get N free blocks...`: an engine took more blocks than are available.

    The pool's own `alloc` returns None instead, because running out of blocks is a normal result.
    """


class BlockError(KvelasticError, ValueError, code="BLOCK"):
    """A block id was used in a way that its state does not allow. The pool is unchanged."""


class DoubleFreeError(BlockError, code="DOUBLE_FREE"):
    """A block was freed that is already free, or that is listed twice in one call."""


class UnknownBlockError(BlockError, code="UNKNOWN_BLOCK"):
    """A block id is outside the pool, or in the gap between two pages."""


class NullBlockError(BlockError, code="NULL_BLOCK"):
    """Block id 0 is the null block: it always exists and is never allocated or freed."""


class LimitError(KvelasticError, ValueError, code="LIMIT"):
    """A limit is out of range: negative, or below the pages that must stay mapped."""


class GuaranteeError(LimitError, code="GUARANTEE"):
    """Guarantees and reserves exceed the device's memory; the message names their holders."""


class ReserveError(LimitError, code="RESERVE"):
    """Other instances did not release memory for a reserve in time; the message names them."""


class DriverError(KvelasticError, RuntimeError, code="DRIVER"):
    """The operating system or the GPU driver refused a call; its steps have been undone."""


class DeviceUnavailableError(DriverError, code="DEVICE_UNAVAILABLE"):
    """The device does not exist, or its driver is missing or too old."""


class StreamsUnknownError(DriverError, code="STREAMS_UNKNOWN"):
    """A GPU's pages may be in use, and the streams of the kernels that use them are not known."""


class OutOfMemoryError(DriverError, MemoryError, code="OUT_OF_MEMORY"):
    """The device has no memory for a page, or the process has no addresses for a range."""


class LimitReachedError(OutOfMemoryError, code="LIMIT_REACHED"):
    """An instance that cannot wait needs more than its limit. It is unchanged."""


class MappingError(DriverError, code="MAPPING"):
    """A page could not be mapped or unmapped, or is already in the requested state."""


class PoolFailedError(DriverError, code="POOL_FAILED"):
    """A rollback failed, so the pool refuses further work. Create a new pool."""


class NvmlError(DriverError, code="NVML"):
    """NVML, NVIDIA's management library, refused a query."""

    def __init__(self, message: str, status: int = 999) -> None:
        super().__init__(message)
        self.status = status
        """NVML's error number; 999 means unknown. See `kvelastic.device.nvml.Status`."""


class SegmentError(KvelasticError, OSError, code="SEGMENT"):
    """An instance's shared-memory segment could not be created, read or written."""


class SegmentNotFoundError(SegmentError, FileNotFoundError, code="SEGMENT_NOT_FOUND"):
    """No segment has this name: the instance never started or has ended."""

    def __init__(self, message: str = "", filename: str | None = None) -> None:
        super().__init__(message)
        if filename is not None:
            self.errno, self.strerror, self.filename = errno.ENOENT, message, filename

    def __str__(self) -> str:
        return str(self.args[0])  # not OSError's format with a filename


class SegmentExistsError(SegmentError, FileExistsError, code="SEGMENT_EXISTS"):
    """A live instance already has this name; choose another `KVELASTIC_IPC_NAME`."""


class SegmentFormatError(SegmentError, code="SEGMENT_FORMAT"):
    """The data is not a kvelastic segment, or has a version that this build cannot read."""


class SegmentBusyError(SegmentError, code="SEGMENT_BUSY"):
    """The segment is in use by a live process, or its lock is held."""


class SegmentDeadError(SegmentError, code="SEGMENT_DEAD"):
    """The segment's process is gone and cannot handle requests. The segment can be removed."""


class LedgerError(KvelasticError, OSError, code="LEDGER"):
    """The ledger of a device cannot be used."""


class LedgerForeignError(LedgerError, code="LEDGER_FOREIGN"):
    """The ledger belongs to another user, whose instances share the device."""


class ChannelError(KvelasticError, RuntimeError, code="CHANNEL"):
    """A ring or a connection between processes violated its protocol or lost its other end."""


class ChannelTimeoutError(ChannelError, TimeoutError, code="CHANNEL_TIMEOUT"):
    """The other end did not reply in time; for a worker, within `KVELASTIC_IPC_TIMEOUT`."""


class ChannelClosedError(ChannelError, code="CHANNEL_CLOSED"):
    """The other end closed the ring or the connection, or died."""


class MessageError(ChannelError, code="MESSAGE"):
    """A message is too large, or is not part of the protocol."""


class MessageVersionError(MessageError, code="MESSAGE_VERSION"):
    """The two ends of a connection use different versions or different protocols."""


class AccessDeniedError(ChannelError, PermissionError, code="ACCESS_DENIED"):
    """A peer belongs to another user, connects from another network, or has another secret."""


class SecretError(AccessDeniedError, code="SECRET"):
    """The secret file is missing, accessible to other users, or has no usable secret."""


class TransferError(KvelasticError, RuntimeError, code="TRANSFER"):
    """A copy between processes failed; the content of the target is undefined."""


class NotRegisteredError(TransferError, ValueError, code="NOT_REGISTERED"):
    """A peer named memory that is not completely registered."""


class LeaseLostError(TransferError, code="LEASE_LOST"):
    """The memory may have changed its owner during the copy; copy again."""


class LinkExistsError(TransferError, code="LINK_EXISTS"):
    """The two nodes are already linked."""


class LinkLimitError(TransferError, code="LINK_LIMIT"):
    """One of the two nodes has its maximum number of links."""


class NodeIdTakenError(TransferError, code="NODE_ID_TAKEN"):
    """Both nodes have the same id, or a linked node has the id of the new one."""


class TransferBusyError(TransferError, code="TRANSFER_BUSY"):
    """Too many copies are in progress; try again."""


class DataDistError(KvelasticError, RuntimeError, code="DATADIST"):
    """A call of the LLM-DataDist interface failed: `kvelastic.datadist.LLMException`."""


class EngineError(KvelasticError, RuntimeError, code="ENGINE"):
    """The serving engine behaved in a way that its integration does not expect."""


class UnsupportedEngineError(EngineError, code="UNSUPPORTED_ENGINE"):
    """The integration does not support the engine's version or one of its settings."""


class ControllerError(KvelasticError, RuntimeError, code="CONTROLLER"):
    """The HTTP controller cannot do what was requested."""


class ControllerConfigError(ControllerError, ValueError, code="CONTROLLER_CONFIG"):
    """The controller's configuration file is invalid; the message lists every invalid key."""


class EngineCallError(ControllerError, code="ENGINE_CALL"):
    """An engine failed an HTTP call of the controller (sleep, wake, health)."""


class PortTakenError(ControllerError, code="PORT_TAKEN"):
    """Another process listens on the port of an engine to launch; the message names it."""


class ClusterError(KvelasticError, RuntimeError, code="CLUSTER"):
    """A Ray Serve deployment cannot do what was requested."""


class ClusterConfigError(ClusterError, ValueError, code="CLUSTER_CONFIG"):
    """The configuration of a Serve application is invalid; the message lists every invalid key."""


class ReplicaLostError(ClusterError, code="REPLICA_LOST"):
    """A replica or its host ended or became unreachable during a request."""


class TerminalError(KvelasticError, code="TERMINAL"):
    """Standard input and output are not a terminal that kvtop can draw on."""


class IntegrityError(KvelasticError, RuntimeError, code="INTEGRITY"):
    """`check_integrity()` found a broken invariant: a bug in kvelastic. Please report it."""


@lru_cache(maxsize=1)
def errors_by_code() -> dict[str, type[KvelasticError]]:
    """Return every exception class by its code. The dict is shared; do not modify it."""
    table: dict[str, type[KvelasticError]] = {}
    waiting: list[type[KvelasticError]] = [KvelasticError]
    while waiting:
        cls = waiting.pop()
        # A subclass defined in another module (a test, an application) does not replace its
        # parent's entry.
        table.setdefault(cls.code, cls)
        if cls.__module__ == __name__:
            waiting.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return table


def native_error(code: str, message: str) -> KvelasticError:
    """Create the exception for a code of native code; called by the C++ binding.

    Never raises. An unknown code becomes a plain `KvelasticError` with this `code`, so that no
    failure is lost.
    """
    cls = errors_by_code().get(code)
    if cls is not None:
        return cls(message)
    error = KvelasticError(message)
    # Set on the instance only, because the class keeps its own code. Pickle and copy keep __dict__.
    error.__dict__["code"] = code
    return error


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes means that no file descriptor was left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
            return True
        error = error.__cause__
    return False
