"""Every error kvelastic raises, in one tree.

Each class has a stable `code`, and derives from the builtin that callers already catch (in
brackets), so `except ValueError` and `except kvelastic.errors.KvelasticError` both work::

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

A message says what happened, with which value, and what to do next. The native code knows only
the codes: it raises through `native_error`.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from typing import ClassVar


class KvelasticError(Exception):
    """The root of the tree: catch it to catch everything that kvelastic raises on purpose."""

    code: ClassVar[str] = "KVELASTIC_ERROR"
    """Stable name of the kind of error, for programs; the message is for people."""


class ConfigError(KvelasticError, RuntimeError, ValueError):
    """A `KVELASTIC_*` variable has a value that it does not accept; raised before any work."""

    code = "CONFIG"


class InvalidArgumentError(KvelasticError, ValueError):
    """An argument (a size, a percentage, a dtype, a device) is not one of those accepted."""

    code = "INVALID_ARGUMENT"


class NotInitializedError(KvelasticError, RuntimeError):
    """A call that needs `init_kvelastic()` came before it, or after `shutdown_kvelastic()`."""

    code = "NOT_INITIALIZED"

    def __init__(
        self,
        message: str = "kvelastic is not initialized. Call init_kvelastic() first.",
    ) -> None:
        super().__init__(message)


class LayoutError(KvelasticError, ValueError):
    """A block fits no page, or a shape does not match what was said of it."""

    code = "LAYOUT"


class UnsupportedError(KvelasticError, NotImplementedError):
    """The model or layout is of a kind that kvelastic does not serve, e.g. a hybrid model."""

    code = "UNSUPPORTED"


class PoolExhaustedError(KvelasticError, ValueError):
    """`Cannot get N free blocks...`: an engine took blocks without asking whether they are there.

    The pool's own `alloc` answers None instead: running out is an answer, not an accident.
    """

    code = "POOL_EXHAUSTED"


class BlockError(KvelasticError, ValueError):
    """A block id was used in a way that its state does not allow; the pool is unchanged."""

    code = "BLOCK"


class DoubleFreeError(BlockError):
    """A block was freed that is free already, or twice in one call."""

    code = "DOUBLE_FREE"


class UnknownBlockError(BlockError):
    """A block id lies outside the pool, or between two pages where no block lives."""

    code = "UNKNOWN_BLOCK"


class NullBlockError(BlockError):
    """Block id 0 is the null block: always there, never handed out, never freed."""

    code = "NULL_BLOCK"


class LimitError(KvelasticError, ValueError):
    """A limit that is out of range: negative, or below the pages that must stay mapped."""

    code = "LIMIT"


class GuaranteeError(LimitError):
    """Guarantees and reserves would be more than the device has; the message says who has them."""

    code = "GUARANTEE"


class ReserveError(LimitError):
    """Others did not give in time what is to be reserved; the message says who holds what."""

    code = "RESERVE"


class DriverError(KvelasticError, RuntimeError):
    """The operating system or the GPU's driver refused a call; all steps of it are undone."""

    code = "DRIVER"


class DeviceUnavailableError(DriverError):
    """There is no such device, no driver for it, or one that is too old."""

    code = "DEVICE_UNAVAILABLE"


class StreamsUnknownError(DriverError):
    """A GPU's pages may be in use, and its driver was not told by the kernels of which streams."""

    code = "STREAMS_UNKNOWN"


class OutOfMemoryError(DriverError, MemoryError):
    """The device has no memory left for a page, or no address space for a range."""

    code = "OUT_OF_MEMORY"


class LimitReachedError(OutOfMemoryError):
    """An instance that cannot wait needs more than its limit; it is as it was before the call."""

    code = "LIMIT_REACHED"


class MappingError(DriverError):
    """A page could not be mapped or unmapped, or is mapped already, or is not."""

    code = "MAPPING"


class PoolFailedError(DriverError):
    """A rollback failed too, so the pool refuses all further work; make a new one."""

    code = "POOL_FAILED"


class NvmlError(DriverError):
    """NVML, NVIDIA's management library, refused a question."""

    code = "NVML"

    def __init__(self, message: str, status: int = 999) -> None:
        super().__init__(message)
        self.status = status
        """NVML's own number; 999 means unknown. See `kvelastic.nvml.Status`."""


class SegmentError(KvelasticError, OSError):
    """An instance's shared-memory segment could not be made, read or written."""

    code = "SEGMENT"


class SegmentNotFoundError(SegmentError, FileNotFoundError):
    """No segment has this name: the instance never started, or has ended."""

    code = "SEGMENT_NOT_FOUND"

    def __init__(self, message: str = "", filename: str | None = None) -> None:
        super().__init__(message)
        if filename is not None:
            self.errno, self.strerror, self.filename = errno.ENOENT, message, filename

    def __str__(self) -> str:
        return str(self.args[0])  # not the form that OSError has for a filename


class SegmentExistsError(SegmentError, FileExistsError):
    """A live instance has this name already; choose another `KVELASTIC_IPC_NAME`."""

    code = "SEGMENT_EXISTS"


class SegmentFormatError(SegmentError):
    """The bytes are no segment of kvelastic, or of a version that this build cannot read."""

    code = "SEGMENT_FORMAT"


class SegmentBusyError(SegmentError):
    """The segment belongs to a live process, and the call would take it from under it."""

    code = "SEGMENT_BUSY"


class SegmentDeadError(SegmentError):
    """The segment's process is gone, so nobody will answer a request; it can be removed."""

    code = "SEGMENT_DEAD"


class LedgerError(KvelasticError, OSError):
    """The record that the instances of a device share cannot be used."""

    code = "LEDGER"


class LedgerForeignError(LedgerError):
    """It belongs to another user, whose instances share the device."""

    code = "LEDGER_FOREIGN"


class ChannelError(KvelasticError, RuntimeError):
    """What joins two processes (a ring, a connection) broke its rules or lost its other end."""

    code = "CHANNEL"


class ChannelTimeoutError(ChannelError, TimeoutError):
    """The other end did not answer in time; a worker: within `KVELASTIC_IPC_TIMEOUT`."""

    code = "CHANNEL_TIMEOUT"


class ChannelClosedError(ChannelError):
    """The other end has closed the ring or the connection, or has died."""

    code = "CHANNEL_CLOSED"


class MessageError(ChannelError):
    """A message that is larger than allowed, or none of those that the protocol has."""

    code = "MESSAGE"


class MessageVersionError(MessageError):
    """The two ends of a connection are of different versions, or of different protocols."""

    code = "MESSAGE_VERSION"


class AccessDeniedError(ChannelError, PermissionError):
    """A peer is another user's process, comes from another network, or has another secret."""

    code = "ACCESS_DENIED"


class SecretError(AccessDeniedError):
    """The file with the secret is missing, open to others, or has none that is good enough."""

    code = "SECRET"


class TransferError(KvelasticError, RuntimeError):
    """Bytes were not copied between processes; what the target holds there is undefined."""

    code = "TRANSFER"


class NotRegisteredError(TransferError, ValueError):
    """A peer named memory that is not registered, or not as a whole."""

    code = "NOT_REGISTERED"


class LeaseLostError(TransferError):
    """The memory's owner could not say that it was its own all the time; copy again."""

    code = "LEASE_LOST"


class LinkExistsError(TransferError):
    """The two nodes have a link already."""

    code = "LINK_EXISTS"


class LinkLimitError(TransferError):
    """One of the two nodes has as many links as it may have."""

    code = "LINK_LIMIT"


class NodeIdTakenError(TransferError):
    """Both nodes have the same id, or a node that is linked has the id of the new one."""

    code = "NODE_ID_TAKEN"


class TransferBusyError(TransferError):
    """Too many copies are under way at once; try again."""

    code = "TRANSFER_BUSY"


class DataDistError(KvelasticError, RuntimeError):
    """A call of LLM-DataDist's interface failed: `kvelastic.datadist.LLMException`."""

    code = "DATADIST"


class EngineError(KvelasticError, RuntimeError):
    """The serving engine did something that its integration does not expect."""

    code = "ENGINE"


class UnsupportedEngineError(EngineError):
    """The engine's version or one of its settings does not fit this integration."""

    code = "UNSUPPORTED_ENGINE"


class ControllerError(KvelasticError, RuntimeError):
    """The HTTP front over the instances cannot do what was asked."""

    code = "CONTROLLER"


class ControllerConfigError(ControllerError, ValueError):
    """The controller's configuration file is wrong; the message names every key at fault."""

    code = "CONTROLLER_CONFIG"


class EngineCallError(ControllerError):
    """An engine did not do what the controller asked of it over HTTP (sleep, wake, health)."""

    code = "ENGINE_CALL"


class PortTakenError(ControllerError):
    """The port of an engine that is to be launched has another listener; the message names it."""

    code = "PORT_TAKEN"


class ClusterError(KvelasticError, RuntimeError):
    """A deployment of Ray Serve cannot do what was asked."""

    code = "CLUSTER"


class ClusterConfigError(ClusterError, ValueError):
    """The configuration of a Serve application is wrong; the message names every key at fault."""

    code = "CLUSTER_CONFIG"


class ReplicaLostError(ClusterError):
    """A replica, or its host, ended or went out of reach while it had a request."""

    code = "REPLICA_LOST"


class TerminalError(KvelasticError):
    """Standard input and output are not a terminal that kvtop can draw on."""

    code = "TERMINAL"


class IntegrityError(KvelasticError, RuntimeError):
    """`check_integrity()` found a broken invariant: a bug in kvelastic, please report it."""

    code = "INTEGRITY"


@lru_cache(maxsize=1)
def errors_by_code() -> dict[str, type[KvelasticError]]:
    """Every class of the tree by its code; do not change the answer, it is shared."""
    table: dict[str, type[KvelasticError]] = {}
    waiting: list[type[KvelasticError]] = [KvelasticError]
    while waiting:
        cls = waiting.pop()
        # A subclass defined elsewhere (a test, an application) keeps its parent's code and place.
        table.setdefault(cls.code, cls)
        if cls.__module__ == __name__:
            waiting.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return table


def native_error(code: str, message: str) -> KvelasticError:
    """Build the error that the native code means by `code`; called by the C++ binding.

    Raises nothing: a code that this version does not know becomes a plain `KvelasticError`
    whose `code` is the one given, so that no failure is lost for want of a class.
    """
    cls = errors_by_code().get(code)
    if cls is not None:
        return cls(message)
    error = KvelasticError(message)
    # On the instance only: the class keeps its own code. Pickle and copy carry it in __dict__.
    error.__dict__["code"] = code
    return error


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that no file descriptor was left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
            return True
        error = error.__cause__
    return False
