"""Parses `KVELASTIC_TIERS`: `host:4G,disk:/path:200G,folder:PATH,mooncake:HOST`.

    parse_tiers("host:4G,disk:/var/kv:200G")
    # (TierSpec("host", limit_bytes=4 << 30), TierSpec("disk", ("/var/kv",), 200 << 30))

The configuration imports this module, so it must not import stores.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
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
