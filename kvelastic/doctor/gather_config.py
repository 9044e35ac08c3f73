"""Reads kvelastic's environment variables one by one, and tries the folders of tiers.

`config.load` stops at the first invalid value, as an engine should. Here each value is checked
separately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from kvelastic import config
from kvelastic.doctor.facts import ConfigFacts, LegacyName, TierFolderFact
from kvelastic.engines import ENGINES
from kvelastic.errors import ConfigError
from kvelastic.tier_list import TierSpec, why_unusable

_PATIENCE_S: Final = 5.0

# Matches a missing, doubled or wrong letter, but not just a shared word.
_TYPO: Final = 0.85


def gather_config(environ: Mapping[str, str]) -> ConfigFacts:
    """Read the variables of kvelastic and kvcached, and those with which engines choose plugins.

    Never raises.
    """
    errors: list[tuple[str, str]] = []
    valid: dict[str, str] = {}
    for variable in config.VARIABLES:
        for name in (variable.name, variable.legacy):
            text = environ.get(name, "").strip() if name else ""
            if not name or not text:
                continue
            try:
                config.load({name: text})
                valid[name] = text
            except ConfigError as error:
                errors.append((name, str(error)))
            break  # as in config: if the new name is set, the old one is not read
    try:
        settings = config.load(valid)
    except ConfigError as error:  # valid values that contradict each other
        errors.append((str(error).partition("=")[0], str(error)))
        settings = config.Config()
    is_named = any(name in valid for name in ("ENABLE_KVELASTIC", "ENABLE_KVCACHED"))
    return ConfigFacts(
        errors=tuple(errors),
        unknown=_unknown(environ),
        legacy=_legacy(environ),
        names_set=tuple(valid),
        enabled=settings.enabled if is_named else None,
        strict=settings.strict,
        device=settings.device,
        host_memory_bytes=settings.host_memory,
        page_bytes=settings.page_size_bytes,
        allowed_plugins=tuple(
            (engine.name, environ[engine.plugins_variable])
            for engine in ENGINES
            if engine.plugins_variable in environ
        ),
        is_kvcached_enabled=any(
            environ.get(name, "").strip().lower() in {"true", "1", "yes", "on"}
            for name in ("ENABLE_KVCACHED", "KVCACHED_AUTOPATCH")
        ),
        tiers=settings.tiers,
    )


def gather_tier_folders(
    tiers: Sequence[TierSpec], patience_s: float = _PATIENCE_S
) -> tuple[TierFolderFact, ...]:
    """Try the folders of tiers, at once; return those that cannot be used. Never raises.

    Blocks for at most `patience_s` if a file system does not respond.
    """
    places = [(spec.kind, folder) for spec in tiers for folder in spec.folders]
    found: dict[int, str] = {}

    def look(number: int) -> None:
        found[number] = why_unusable(*places[number])

    looks = [threading.Thread(target=look, args=(n,), daemon=True) for n in range(len(places))]
    for thread in looks:
        thread.start()
    end_s = time.monotonic() + patience_s
    for thread in looks:
        thread.join(max(0.0, end_s - time.monotonic()))
    silent = f"no response from its file system within {patience_s:g} s"
    said = ((kind, found.get(n, f"{folder}: {silent}")) for n, (kind, folder) in enumerate(places))
    return tuple(TierFolderFact(kind, problem) for kind, problem in said if problem)


def _unknown(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return unknown names with kvelastic's prefix, and probable typos of known names."""
    known = {variable.name for variable in config.VARIABLES}
    legacy = {variable.legacy for variable in config.VARIABLES}
    found = []
    for name in sorted(environ.keys() - known - config.FROM_CONTROLLER):
        if name in legacy:
            continue
        ours = name.startswith("KVELASTIC_")
        near = get_close_matches(name, sorted(known), n=1, cutoff=0.0 if ours else _TYPO)
        # kvcached's names are similar too; `_legacy` reports them.
        if near and not name.startswith("KVCACHED_"):
            found.append((name, near[0]))
    return tuple(found)


def _legacy(environ: Mapping[str, str]) -> tuple[LegacyName, ...]:
    successors = {v.legacy: v.name for v in config.VARIABLES if v.legacy is not None}
    found = []
    for name in sorted(environ):
        if name in successors or name.startswith("KVCACHED_"):
            successor = successors.get(name)
            overruled = successor is not None and bool(environ.get(successor, "").strip())
            found.append(LegacyName(name, successor, overruled))
    return tuple(found)
