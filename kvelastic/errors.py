"""The exceptions that kvelastic raises, in one class hierarchy.

Each class has a stable `code`. It also derives from the built-in exception in brackets, so
`except ValueError` and `except kvelastic.errors.KvelasticError` both work::

    KvelasticError                          KVELASTIC_ERROR
    ├── ConfigError                         CONFIG               [RuntimeError, ValueError]
    ├── InvalidArgumentError                INVALID_ARGUMENT     [ValueError]
    ├── NotInitializedError                 NOT_INITIALIZED      [RuntimeError]
    ├── LayoutError                         LAYOUT               [ValueError]
    ├── UnsupportedError                    UNSUPPORTED          [NotImplementedError]
    ├── PoolExhaustedError                  POOL_EXHAUSTED       [ValueError]
    ├── BlockError                          BLOCK                [ValueError]
    │   ├── DoubleFreeError                 DOUBLE_FREE
    │   ├── UnknownBlockError               UNKNOWN_BLOCK
    │   └── NullBlockError                  NULL_BLOCK
    ├── LimitError                          LIMIT                [ValueError]
    │   ├── GuaranteeError                  GUARANTEE
    │   └── ReserveError                    RESERVE
    ├── DriverError                         DRIVER               [RuntimeError]
    │   ├── DeviceUnavailableError          DEVICE_UNAVAILABLE
    │   ├── StreamsUnknownError             STREAMS_UNKNOWN
    │   ├── OutOfMemoryError                OUT_OF_MEMORY        [MemoryError]
    │   │   └── LimitReachedError           LIMIT_REACHED
    │   ├── MappingError                    MAPPING
    │   ├── PoolFailedError                 POOL_FAILED
    │   └── NvmlError                       NVML
    ├── SegmentError                        SEGMENT              [OSError]
    │   ├── SegmentNotFoundError            SEGMENT_NOT_FOUND    [FileNotFoundError]
    │   ├── SegmentExistsError              SEGMENT_EXISTS       [FileExistsError]
    │   ├── SegmentFormatError              SEGMENT_FORMAT
    │   ├── SegmentBusyError                SEGMENT_BUSY
    │   └── SegmentDeadError                SEGMENT_DEAD
    ├── LedgerError                         LEDGER               [OSError]
    │   └── LedgerForeignError              LEDGER_FOREIGN
    ├── ChannelError                        CHANNEL              [RuntimeError]
    │   ├── ChannelTimeoutError             CHANNEL_TIMEOUT      [TimeoutError]
    │   ├── ChannelClosedError              CHANNEL_CLOSED
    │   ├── MessageError                    MESSAGE
    │   │   └── MessageVersionError         MESSAGE_VERSION
    │   └── AccessDeniedError               ACCESS_DENIED        [PermissionError]
    │       └── SecretError                 SECRET
    ├── TransferError                       TRANSFER             [RuntimeError]
    │   ├── NotRegisteredError              NOT_REGISTERED       [ValueError]
    │   ├── LeaseLostError                  LEASE_LOST
    │   ├── LinkExistsError                 LINK_EXISTS
    │   ├── LinkLimitError                  LINK_LIMIT
    │   ├── NodeIdTakenError                NODE_ID_TAKEN
    │   └── TransferBusyError               TRANSFER_BUSY
    ├── DataDistError                       DATADIST             [RuntimeError]
    ├── EngineError                         ENGINE               [RuntimeError]
    │   └── UnsupportedEngineError          UNSUPPORTED_ENGINE
    ├── ControllerError                     CONTROLLER           [RuntimeError]
    │   ├── ControllerConfigError           CONTROLLER_CONFIG    [ValueError]
    │   ├── EngineCallError                 ENGINE_CALL
    │   └── PortTakenError                  PORT_TAKEN
    ├── ClusterError                        CLUSTER              [RuntimeError]
    │   ├── ClusterConfigError              CLUSTER_CONFIG       [ValueError]
    │   └── ReplicaLostError                REPLICA_LOST
    ├── TerminalError                       TERMINAL
    └── IntegrityError                      INTEGRITY            [RuntimeError]

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


class ConfigError(KvelasticError, RuntimeError, ValueError):
    """A `KVELASTIC_*` variable has an invalid value. Raised before any work starts."""

    code = "CONFIG"


class InvalidArgumentError(KvelasticError, ValueError):
    """An argument (a size, a percentage, a dtype, a device) has an invalid value."""

    code = "INVALID_ARGUMENT"


class NotInitializedError(KvelasticError, RuntimeError):
    """A call before `init_kvelastic()`, or after `shutdown_kvelastic()`."""

    code = "NOT_INITIALIZED"

    def __init__(
        self,
        message: str = "kvelastic is not initialized. Call init_kvelastic() first.",
    ) -> None:
        super().__init__(message)


class LayoutError(KvelasticError, ValueError):
    """A block does not fit into a page, or a shape does not match its description."""

    code = "LAYOUT"


class UnsupportedError(KvelasticError, NotImplementedError):
    """kvelastic does not support the model or layout, e.g. a hybrid model."""

    code = "UNSUPPORTED"


class PoolExhaustedError(KvelasticError, ValueError):
    """`Cannot get N free blocks...`: an engine took more blocks than are available.

    The pool's own `alloc` returns None instead, because running out of blocks is a normal result.
    """

    code = "POOL_EXHAUSTED"


class BlockError(KvelasticError, ValueError):
    """A block id was used in a way that its state does not allow. The pool is unchanged."""

    code = "BLOCK"


class DoubleFreeError(BlockError):
    """A block was freed that is already free, or that is listed twice in one call."""

    code = "DOUBLE_FREE"


class UnknownBlockError(BlockError):
    """A block id is outside the pool, or in the gap between two pages."""

    code = "UNKNOWN_BLOCK"


class NullBlockError(BlockError):
    """Block id 0 is the null block: it always exists and is never allocated or freed."""

    code = "NULL_BLOCK"


class LimitError(KvelasticError, ValueError):
    """A limit is out of range: negative, or below the pages that must stay mapped."""

    code = "LIMIT"


class GuaranteeError(LimitError):
    """Guarantees and reserves exceed the device's memory; the message names their holders."""

    code = "GUARANTEE"


class ReserveError(LimitError):
    """Other instances did not release memory for a reserve in time; the message names them."""

    code = "RESERVE"


class DriverError(KvelasticError, RuntimeError):
    """The operating system or the GPU driver refused a call; its steps have been undone."""

    code = "DRIVER"


class DeviceUnavailableError(DriverError):
    """The device does not exist, or its driver is missing or too old."""

    code = "DEVICE_UNAVAILABLE"


class StreamsUnknownError(DriverError):
    """A GPU's pages may be in use, and the streams of the kernels that use them are not known."""

    code = "STREAMS_UNKNOWN"


class OutOfMemoryError(DriverError, MemoryError):
    """The device has no memory for a page, or the process has no addresses for a range."""

    code = "OUT_OF_MEMORY"


class LimitReachedError(OutOfMemoryError):
    """An instance that cannot wait needs more than its limit. It is unchanged."""

    code = "LIMIT_REACHED"


class MappingError(DriverError):
    """A page could not be mapped or unmapped, or is already in the requested state."""

    code = "MAPPING"


class PoolFailedError(DriverError):
    """A rollback failed, so the pool refuses further work. Create a new pool."""

    code = "POOL_FAILED"


class NvmlError(DriverError):
    """NVML, NVIDIA's management library, refused a query."""

    code = "NVML"

    def __init__(self, message: str, status: int = 999) -> None:
        super().__init__(message)
        self.status = status
        """NVML's error number; 999 means unknown. See `kvelastic.device.nvml.Status`."""


class SegmentError(KvelasticError, OSError):
    """An instance's shared-memory segment could not be created, read or written."""

    code = "SEGMENT"


class SegmentNotFoundError(SegmentError, FileNotFoundError):
    """No segment has this name: the instance never started or has ended."""

    code = "SEGMENT_NOT_FOUND"

    def __init__(self, message: str = "", filename: str | None = None) -> None:
        super().__init__(message)
        if filename is not None:
            self.errno, self.strerror, self.filename = errno.ENOENT, message, filename

    def __str__(self) -> str:
        return str(self.args[0])  # not OSError's format with a filename


class SegmentExistsError(SegmentError, FileExistsError):
    """A live instance already has this name; choose another `KVELASTIC_IPC_NAME`."""

    code = "SEGMENT_EXISTS"


class SegmentFormatError(SegmentError):
    """The data is not a kvelastic segment, or has a version that this build cannot read."""

    code = "SEGMENT_FORMAT"


class SegmentBusyError(SegmentError):
    """The segment is in use by a live process, or its lock is held."""

    code = "SEGMENT_BUSY"


class SegmentDeadError(SegmentError):
    """The segment's process is gone and cannot handle requests. The segment can be removed."""

    code = "SEGMENT_DEAD"


class LedgerError(KvelasticError, OSError):
    """The ledger of a device cannot be used."""

    code = "LEDGER"


class LedgerForeignError(LedgerError):
    """The ledger belongs to another user, whose instances share the device."""

    code = "LEDGER_FOREIGN"


class ChannelError(KvelasticError, RuntimeError):
    """A ring or a connection between processes violated its protocol or lost its other end."""

    code = "CHANNEL"


class ChannelTimeoutError(ChannelError, TimeoutError):
    """The other end did not reply in time; for a worker, within `KVELASTIC_IPC_TIMEOUT`."""

    code = "CHANNEL_TIMEOUT"


class ChannelClosedError(ChannelError):
    """The other end closed the ring or the connection, or died."""

    code = "CHANNEL_CLOSED"


class MessageError(ChannelError):
    """A message is too large, or is not part of the protocol."""

    code = "MESSAGE"


class MessageVersionError(MessageError):
    """The two ends of a connection use different versions or different protocols."""

    code = "MESSAGE_VERSION"


class AccessDeniedError(ChannelError, PermissionError):
    """A peer belongs to another user, connects from another network, or has another secret."""

    code = "ACCESS_DENIED"


class SecretError(AccessDeniedError):
    """The secret file is missing, accessible to other users, or has no usable secret."""

    code = "SECRET"


class TransferError(KvelasticError, RuntimeError):
    """A copy between processes failed; the content of the target is undefined."""

    code = "TRANSFER"


class NotRegisteredError(TransferError, ValueError):
    """A peer named memory that is not completely registered."""

    code = "NOT_REGISTERED"


class LeaseLostError(TransferError):
    """The memory may have changed its owner during the copy; copy again."""

    code = "LEASE_LOST"


class LinkExistsError(TransferError):
    """The two nodes are already linked."""

    code = "LINK_EXISTS"


class LinkLimitError(TransferError):
    """One of the two nodes has its maximum number of links."""

    code = "LINK_LIMIT"


class NodeIdTakenError(TransferError):
    """Both nodes have the same id, or a linked node has the id of the new one."""

    code = "NODE_ID_TAKEN"


class TransferBusyError(TransferError):
    """Too many copies are in progress; try again."""

    code = "TRANSFER_BUSY"


class DataDistError(KvelasticError, RuntimeError):
    """A call of the LLM-DataDist interface failed: `kvelastic.datadist.LLMException`."""

    code = "DATADIST"


class EngineError(KvelasticError, RuntimeError):
    """The serving engine behaved in a way that its integration does not expect."""

    code = "ENGINE"


class UnsupportedEngineError(EngineError):
    """The integration does not support the engine's version or one of its settings."""

    code = "UNSUPPORTED_ENGINE"


class ControllerError(KvelasticError, RuntimeError):
    """The HTTP controller cannot do what was requested."""

    code = "CONTROLLER"


class ControllerConfigError(ControllerError, ValueError):
    """The controller's configuration file is invalid; the message lists every invalid key."""

    code = "CONTROLLER_CONFIG"


class EngineCallError(ControllerError):
    """An engine failed an HTTP call of the controller (sleep, wake, health)."""

    code = "ENGINE_CALL"


class PortTakenError(ControllerError):
    """Another process listens on the port of an engine to launch; the message names it."""

    code = "PORT_TAKEN"


class ClusterError(KvelasticError, RuntimeError):
    """A Ray Serve deployment cannot do what was requested."""

    code = "CLUSTER"


class ClusterConfigError(ClusterError, ValueError):
    """The configuration of a Serve application is invalid; the message lists every invalid key."""

    code = "CLUSTER_CONFIG"


class ReplicaLostError(ClusterError):
    """A replica or its host ended or became unreachable during a request."""

    code = "REPLICA_LOST"


class TerminalError(KvelasticError):
    """Standard input and output are not a terminal that kvtop can draw on."""

    code = "TERMINAL"


class IntegrityError(KvelasticError, RuntimeError):
    """`check_integrity()` found a broken invariant: a bug in kvelastic. Please report it."""

    code = "INTEGRITY"


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
