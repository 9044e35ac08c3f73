"""Status codes, the exception that carries one, and the mapping from kvelastic's own errors.

    try:
        manager.pull_cache(key, cache)
    except LLMException as failed:
        if failed.status_code is LLMStatusCode.LLM_TIMEOUT: ...      # link again
        failed.__cause__         # kvelastic's error, if any

Every `LLMException` is also a `KvelasticError` with the code `DATADIST`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from kvelastic.errors import DataDistError, KvelasticError

_BASE: Final = 0x5010B000


class NamedEnum(IntEnum):
    """Numbers that print as their names, as the original's enumerations do: `LLMRole.MIX`."""

    def __str__(self) -> str:
        """Return the class and the member, for example `LLMRole.MIX`."""
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        """Return `str()`, padded as the format requires."""
        return format(str(self), spec)


class LLMStatusCode(NamedEnum):
    """Result of a call. All but three codes are recoverable (`is_recoverable`)."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_UNKNOWN_ERROR = -1
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17  # as the original spells it
    LLM_SEQ_LEN_OVER_LIMIT = LLM_SEQ_LENOVERLIMIT
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    # Numbers of the original's runtime, never returned here.
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057

    @property
    def is_recoverable(self) -> bool:
        """Whether the process can continue; after `LLM_TIMEOUT` of a transfer, with a new link."""
        return self not in _FATAL


_FATAL: Final = frozenset(
    {
        LLMStatusCode.LLM_FAILED,
        LLMStatusCode.LLM_UNKNOWN_ERROR,
        LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR,
    }
)


class Status:
    """A status code with a test for success."""

    def __init__(self, status: LLMStatusCode) -> None:
        self._status_code = status

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code."""
        return self._status_code

    def is_ok(self) -> bool:
        """Whether the code is `LLM_SUCCESS`."""
        return self._status_code is LLMStatusCode.LLM_SUCCESS


class LLMException(DataDistError):  # noqa: N818 - the interface's name
    """A failed call. `status_code` is the reason."""

    def __init__(
        self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    ) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code of the call."""
        return self._status_code


def failure(status: LLMStatusCode, message: str) -> LLMException:
    """Return the exception of a code."""
    return LLMException(message, status_code=status)


class LLMParamError(LLMException, ValueError):
    """An invalid argument: `LLM_PARAM_INVALID`, and also a `ValueError`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args, status_code=LLMStatusCode.LLM_PARAM_INVALID)


# The first entry along the class hierarchy counts, so a new error inherits its parent's status.
_STATUS_OF_CODE: Final = {
    "INVALID_ARGUMENT": LLMStatusCode.LLM_PARAM_INVALID,
    "LAYOUT": LLMStatusCode.LLM_PARAM_INVALID,
    "BLOCK": LLMStatusCode.LLM_PARAM_INVALID,
    "CONFIG": LLMStatusCode.LLM_PARAM_INVALID,
    "LIMIT": LLMStatusCode.LLM_OUT_OF_MEMORY,
    "OUT_OF_MEMORY": LLMStatusCode.LLM_OUT_OF_MEMORY,
    "POOL_EXHAUSTED": LLMStatusCode.LLM_OUT_OF_MEMORY,
    "NOT_INITIALIZED": LLMStatusCode.LLM_ENGINE_FINALIZED,
    "UNSUPPORTED": LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    "CHANNEL_TIMEOUT": LLMStatusCode.LLM_TIMEOUT,
    "CHANNEL": LLMStatusCode.LLM_LINK_FAILED,
    "MAPPING": LLMStatusCode.LLM_PARAM_INVALID,
    "LINK_EXISTS": LLMStatusCode.LLM_ALREADY_LINK,
    "LINK_LIMIT": LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
    "NODE_ID_TAKEN": LLMStatusCode.LLM_LINK_FAILED,
    "NOT_REGISTERED": LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    "LEASE_LOST": LLMStatusCode.LLM_LINK_BUSY,
    "TRANSFER_BUSY": LLMStatusCode.LLM_LINK_BUSY,
}


def status_of(error: BaseException) -> LLMStatusCode:
    """Return the status code for an error; `LLM_FAILED` if there is no better one."""
    if isinstance(error, LLMException):
        return error.status_code
    for cls in type(error).__mro__:
        status = _STATUS_OF_CODE.get(getattr(cls, "code", ""))
        if status is not None:
            return status
    return LLMStatusCode.LLM_FAILED


def status_of_number(number: int) -> LLMStatusCode:
    """Return the status code of a peer's refusal; `LLM_UNKNOWN_ERROR` unless it is a failure."""
    try:
        status = LLMStatusCode(number)
    except ValueError:
        return LLMStatusCode.LLM_UNKNOWN_ERROR
    is_failure = status is not LLMStatusCode.LLM_SUCCESS
    return status if is_failure else LLMStatusCode.LLM_UNKNOWN_ERROR


@contextmanager
def as_llm_exceptions(doing: str) -> Iterator[None]:
    """Convert kvelastic's errors to `LLMException`; messages start with `doing`."""
    try:
        yield
    except LLMException:
        raise
    except KvelasticError as error:
        raise LLMException(f"{doing}: {error}", status_code=status_of(error)) from error
