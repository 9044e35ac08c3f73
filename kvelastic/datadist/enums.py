"""The interface's enumerations except its status codes, with the original's numbers."""

from __future__ import annotations

from enum import unique

from kvelastic.datadist.status import NamedEnum


@unique
class LLMRole(NamedEnum):
    """Role of a cluster: it fills caches, uses them, or both."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


@unique
class Placement(NamedEnum):
    """Memory that holds a cache. Without a GPU, host memory replaces device memory."""

    HOST = 0
    DEVICE = 1


@unique
class Memtype(NamedEnum):
    """Kind of memory in a `MemInfo`."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


@unique
class RegisterMemStatus(NamedEnum):
    """Result of `query_register_mem_status`."""

    OK = 0
    PREPARING = 1
    FAILED = 2


@unique
class DataType(NamedEnum):
    """Type of an element, with its number in GE's header."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27
