"""The tree of errors: its drawing, its codes, and what native code makes of it."""

from __future__ import annotations

import builtins
import copy
import pickle
import re

import pytest
from processes import UNMEASURED, run_python

from kvelastic import errors
from kvelastic.errors import KvelasticError, errors_by_code, native_error

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, KvelasticError)
]
# What programs may rely on: names, codes, parents and built-in bases.
TREE = """
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
"""
DRAWN = re.compile(
    r"^ {4}(?P<indent>[│ ├└─]*)(?P<name>[A-Z]\w+) +(?P<code>[A-Z_]+)"
    r"(?: +\[(?P<builtins>[\w, ]+)\])?$",
    re.MULTILINE,
)


def drawing() -> list[tuple[str, str, str | None, tuple[str, ...]]]:
    """(name, code, parent's name, builtin bases) of each line of the drawing."""
    rows = []
    parents: list[str] = []
    for match in DRAWN.finditer(TREE):
        depth = len(match["indent"]) // 4
        del parents[depth:]
        named = match["builtins"]
        rows.append(
            (
                match["name"],
                match["code"],
                parents[-1] if parents else None,
                tuple(named.split(", ")) if named else (),
            )
        )
        parents.append(match["name"])
    return rows


def test_error_tree_drawing_lists_exactly_the_classes() -> None:
    assert [row[0] for row in drawing()] != []
    assert sorted(row[0] for row in drawing()) == sorted(cls.__name__ for cls in CLASSES)


@pytest.mark.parametrize(("name", "code", "parent", "builtin_names"), drawing())
def test_error_tree_drawing_matches_the_classes(
    name: str, code: str, parent: str | None, builtin_names: tuple[str, ...]
) -> None:
    cls = getattr(errors, name)
    assert cls.code == code
    own = [base for base in cls.__bases__ if issubclass(base, KvelasticError)]
    assert [base.__name__ for base in own] == ([parent] if parent else [])
    foreign = {base.__name__ for base in cls.__bases__} - {base.__name__ for base in own}
    assert foreign == (set(builtin_names) if parent else {"Exception"})
    for builtin_name in builtin_names:
        assert issubclass(cls, getattr(builtins, builtin_name))


def test_codes_are_unique_and_upper_snake() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[A-Z]+(_[A-Z]+)*", code) for code in codes)
    assert errors_by_code() == {cls.code: cls for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_class_has_docstring_and_code(cls: type[KvelasticError]) -> None:
    assert cls.__dict__.get("__doc__", "").strip()
    assert "code" in cls.__dict__


@pytest.mark.parametrize("cls", CLASSES)
def test_code_round_trips_through_native_error(cls: type[KvelasticError]) -> None:
    error = native_error(cls.code, "what happened")
    assert type(error) is cls
    assert str(error) == "what happened"
    assert error.code == cls.code


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_pickle_and_copy(cls: type[KvelasticError]) -> None:
    error = cls("block 7 is free already")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert str(again) == str(error)
        assert again.code == cls.code


def test_unknown_code_is_kept_on_the_base_class() -> None:
    error = native_error("FROM_THE_FUTURE", "text")
    assert type(error) is KvelasticError
    assert error.code == "FROM_THE_FUTURE"
    assert str(error) == "text"
    assert KvelasticError.code == "KVELASTIC_ERROR"
    assert pickle.loads(pickle.dumps(error)).code == "FROM_THE_FUTURE"


def test_application_subclass_does_not_replace_its_parent() -> None:
    errors_by_code.cache_clear()

    class Local(errors.BlockError):
        """Made by an application."""

    assert errors_by_code()["BLOCK"] is errors.BlockError
    assert Local not in errors_by_code().values()


def test_not_initialized_error_names_init_kvelastic() -> None:
    message = "kvelastic is not initialized. Call init_kvelastic() first."
    assert str(errors.NotInitializedError()) == message
    with pytest.raises(RuntimeError, match="kvelastic is not initialized"):
        raise errors.NotInitializedError


def test_importing_errors_is_light() -> None:
    probe = (
        "import sys; import kvelastic.errors;"
        "print([m for m in ('torch', 'numpy', 'dataclasses', 'logging', 'kvelastic._vmm')"
        " if m in sys.modules])"
    )
    assert run_python("-c", probe, environment=UNMEASURED).stdout.strip() == "[]"
