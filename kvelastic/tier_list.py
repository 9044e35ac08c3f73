"""The tiers of `KVELASTIC_TIERS`: parses the list, and checks its folders.

    parse_tiers("host:4G,disk:/var/kv:200G,folder:PATH,mooncake:HOST")
    # (TierSpec("host", limit_bytes=4 << 30), TierSpec("disk", ("/var/kv",), 200 << 30), ...)
    why_unusable("disk", "/var/kv")     # "Permission denied: /var/kv", or "" if it can be used

The configuration imports this module, so it must not import stores. Stores check a folder with the
same functions when they open it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvelastic.errors import InvalidArgumentError
from kvelastic.units import parse_size

MOST_TIERS: Final = 8
MOST_CHARACTERS: Final = 4096
TIERS_FORMS: Final = (
    "none; or tiers from the nearest to the farthest, with commas between: host:SIZE,"
    " disk:FOLDER:SIZE (several folders with + between), folder:FOLDER:SIZE or folder:FOLDER,"
    " mooncake:HOST:PORT or mooncake:HOST:PORT+SIZE (SIZE of this machine's memory is given to it);"
    " each kind but disk once at most"
)
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NO_FOLDER: Final = frozenset((errno.ELOOP, errno.ENOTDIR, errno.EEXIST))
"""Errors of opening or creating a path that is a link or not a folder."""
_OTHERS: Final = 0o077
_TEST_BYTES: Final = 4096
_ADDRESS: Final = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}")


class TierListError(InvalidArgumentError):
    """A part of the list is invalid; the message says which and why."""


@dataclass(frozen=True)
class TierSpec:
    """One configured tier."""

    kind: str
    """host, disk, folder or mooncake."""
    folders: tuple[str, ...] = ()
    """Absolute paths: one or more for disk, exactly one for folder."""
    limit_bytes: int | None = None
    """Bytes; None: kvelastic enforces none. mooncake: memory of this machine to contribute."""
    address: str = ""
    """Address of a mooncake master."""


def parse_tiers(text: str) -> tuple[TierSpec, ...]:
    """Parse the list; raises `TierListError` that names the invalid part. Linear time."""
    text = text.strip()
    if not text or text.lower() == "none":
        return ()
    if len(text) > MOST_CHARACTERS:
        raise TierListError(f"{len(text)} characters are more than {MOST_CHARACTERS}")
    parts = text.split(",")
    if len(parts) > MOST_TIERS:
        raise TierListError(f"{len(parts)} tiers are more than {MOST_TIERS}")
    specs = tuple(_parse_tier(part.strip()) for part in parts)
    kinds = [spec.kind for spec in specs if spec.kind != "disk"]
    folders = [folder for spec in specs for folder in spec.folders]
    for what in (kinds, folders):
        twice = next((one for one in what if what.count(one) > 1), None)
        if twice is not None:
            raise TierListError(f"{twice!r} is named twice")
    return specs


def _parse_tier(part: str) -> TierSpec:
    kind, colon, rest = part.partition(":")
    kind = kind.strip().lower()
    if not colon or not rest:
        raise TierListError(f"{part!r} does not say what the tier is made of")
    if kind == "host":
        return TierSpec("host", limit_bytes=_size(part, rest))
    if kind == "disk":
        folders, colon, size = rest.rpartition(":")
        if not colon:
            raise TierListError(f"{part!r} has no size: write disk:FOLDER:SIZE")
        return TierSpec("disk", _folders(part, folders), _size(part, size))
    if kind == "folder":
        folder, colon, size = rest.rpartition(":")
        if not colon:
            folder, size = rest, ""
        shared = _folders(part, folder)
        if len(shared) > 1:
            raise TierListError(f"{part!r} names several folders; a shared one is one")
        return TierSpec("folder", shared, _size(part, size) if size else None)
    if kind == "mooncake":
        address, plus, given = rest.partition("+")
        if not _ADDRESS.fullmatch(address):
            raise TierListError(f"{part!r} has no address of a mooncake master")
        return TierSpec("mooncake", (), _size(part, given) if plus else None, address)
    raise TierListError(f"{part!r} is of no kind that is known")


def _folders(part: str, text: str) -> tuple[str, ...]:
    folders = tuple(folder.strip() for folder in text.split("+"))
    for folder in folders:
        if not folder.startswith("/") or "\0" in folder or ":" in folder:
            raise TierListError(
                f"{part!r} has a folder that is not absolute, or has a colon in its name"
            )
    # Normalize the path as the stores do; else two spellings of one folder would be two tiers.
    return tuple("/" + os.path.normpath(folder).lstrip("/") for folder in folders)


def _size(part: str, text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except InvalidArgumentError as error:
        raise TierListError(f"in {part!r}: {error}") from None
    if size_bytes == 0:
        raise TierListError(f"{part!r} has a size of 0; leave the tier out instead")
    return size_bytes


def no_folder(name: str) -> str:
    """Return the refusal of a path with an error of `NO_FOLDER`."""
    return f"{name} is a link or no folder; give a folder of its own"


def fault_of_own(name: str, state: os.stat_result) -> str:
    """Return why a folder is refused that must belong to this user alone; empty if it is not."""
    problem = ""
    if state.st_uid != os.geteuid():
        problem = f"belongs to user {state.st_uid}; give a folder of user {os.geteuid()}"
    elif stat.S_IMODE(state.st_mode) & _OTHERS:
        problem = "is open to others; chmod 700 it, or give a folder of its own"
    return f"{name} {problem}: what lies there is prompts" if problem else ""


def fault_of_shared(name: str, state: os.stat_result) -> str:
    """Return why a folder is refused that machines share; empty if it is not."""
    if state.st_mode & stat.S_IWOTH:
        return f"{name} may be written by all, who could feed this engine wrong KV; chmod o-w it"
    return ""


def reason_of(error: OSError) -> str:
    """Return the text of an error for an operator, such as `Permission denied: /mnt/kv`."""
    if not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def why_unusable(kind: str, folder: str) -> str:
    """Return why a tier of this kind (disk or folder) cannot use the folder; empty if it can.

    Writes one file without a name to an existing folder, and creates no folder. Blocks on the file
    system.
    """
    try:
        fd = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        return _why_not_created(Path(folder))
    except OSError as error:
        return no_folder(folder) if error.errno in NO_FOLDER else reason_of(error)
    try:
        state = os.fstat(fd)
    finally:
        os.close(fd)
    fault = fault_of_own(folder, state) if kind == "disk" else fault_of_shared(folder, state)
    if fault:
        return fault
    from tempfile import TemporaryFile  # imported late: it takes longer than this module

    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_TEST_BYTES))
            file.flush()
    except OSError as error:
        return f"{error.strerror or error}: {folder}"
    return ""


def _why_not_created(folder: Path) -> str:
    parent = next(each for each in folder.parents if os.path.lexists(each))
    if not parent.is_dir():
        return f"{folder} cannot be created: {parent} is no folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{folder} cannot be created: {parent} is not writable for user {os.geteuid()}"
    return ""
