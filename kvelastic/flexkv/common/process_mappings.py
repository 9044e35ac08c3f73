"""Finds the file behind an address of this process, from /proc/self/maps."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvelastic.errors import InvalidArgumentError


class Mapping(NamedTuple):
    """One mapped range of addresses and its file."""

    start: int
    end: int
    is_shared: bool
    is_inaccessible: bool
    offset: int
    """Offset of `start` in the file."""
    device: tuple[int, int]
    inode: int
    path: str


def parse(text: str) -> Iterator[Mapping]:
    """Yield the lines of a maps file, lowest address first."""
    for line in text.splitlines():
        addresses, permissions, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in addresses.split("-"))
        major, minor = (int(part, 16) for part in device.split(":"))
        yield Mapping(
            start,
            end,
            permissions.endswith("s"),
            permissions.startswith("---"),
            int(offset, 16),
            (major, minor),
            int(inode),
            path[0] if path else "",
        )


def behind(address: int, size_bytes: int) -> tuple[Mapping, int | None]:
    """Return the shared file behind these addresses, and the offset of the first address.

    The offset is None if pages are mapped and unmapped there, as in a kvelastic range, or have
    holes between them. Raises `InvalidArgumentError` for memory that no other process can map.
    """
    end = address + size_bytes
    shared: list[Mapping] = []
    reached = address
    for mapping in _own_mappings():
        if mapping.end <= reached or mapping.start >= end:
            continue
        is_hole = not mapping.is_shared and mapping.is_inaccessible
        if mapping.start > reached or not (is_hole or (mapping.is_shared and mapping.inode)):
            break
        if mapping.is_shared:
            shared.append(mapping)
        reached = mapping.end
    files = {(one.device, one.inode) for one in shared}
    if reached < end or len(files) != 1:
        raise InvalidArgumentError(
            f"the {size_bytes} bytes at {address:#x} are memory of this process alone, which no"
            " other process can read; allocate them by"
            " kvelastic.flexkv.common.memory_handle.shared_zeros"
        )
    first = shared[0]
    covered = first.start <= address and sum(one.end - one.start for one in shared) >= size_bytes
    in_order = all(one.offset - first.offset == one.start - first.start for one in shared)
    comes_and_goes = first.path.split(" ")[0] == _OF_RANGES  # even if all pages are mapped now
    if covered and in_order and shared[-1].end >= end and not comes_and_goes:
        return first, first.offset + address - first.start
    return first, None


_OF_RANGES: Final = "/memfd:kvelastic"
"""Name that the host driver gives the memory of its pages."""
PAGE_BYTES: Final = 2 << 20
"""Size and alignment of pages of a host range are multiples of this."""
NOT_MAPPED: Final = -1


def locate(pages: Sequence[int], fd: int) -> list[int]:
    """Return the current file offsets of pages at these addresses (in units of `PAGE_BYTES`).

    `NOT_MAPPED` for a page of other memory. Reads all mappings of this process, which takes some
    milliseconds.
    """
    file = _file_of(fd)
    own = [one for one in _own_mappings() if one.is_shared and (one.device, one.inode) == file]
    starts = [mapping.start for mapping in own]
    offsets = []
    for page in pages:
        address = page * PAGE_BYTES
        at = bisect_right(starts, address) - 1
        is_there = at >= 0 and address + PAGE_BYTES <= own[at].end
        offsets.append(own[at].offset + address - own[at].start if is_there else NOT_MAPPED)
    return offsets


def _own_mappings() -> Iterator[Mapping]:
    return parse(Path("/proc/self/maps").read_text())


def descriptor_of(mapping: Mapping) -> int:
    """Open the file behind a mapping; the caller closes the descriptor.

    Raises `InvalidArgumentError` if the file has no name and this process has no descriptor of it.
    """
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        if _is_of(fd, mapping):
            return os.dup(fd)
    if mapping.path.startswith("/"):
        try:
            fd = os.open(mapping.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            pass
        else:
            if _is_of(fd, mapping):
                return fd
            os.close(fd)
    raise InvalidArgumentError(
        f"the file behind the tensor ({mapping.path}) has no name and no open descriptor here; keep"
        " its descriptor open until the tensor is registered"
    )


def _is_of(fd: int, mapping: Mapping) -> bool:
    try:
        return _file_of(fd) == (mapping.device, mapping.inode)
    except OSError:  # listing the folder or another thread closed it
        return False


def _file_of(fd: int) -> tuple[tuple[int, int], int]:
    found = os.fstat(fd)
    return (os.major(found.st_dev), os.minor(found.st_dev)), found.st_ino
