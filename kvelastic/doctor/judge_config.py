"""Findings about kvelastic's environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvelastic.doctor.facts import Facts, LegacyName
from kvelastic.doctor.finding import Said, check, note, ok, problem, warning


@check("config.value")
def _values(facts: Facts) -> Iterator[Said]:
    for _, message in facts.config.errors:
        accepted = message.partition("; set it to ")[2].rstrip(".")
        do = f"set it to {accepted}" if accepted else "see docs/configuration.md, or unset it"
        yield problem(message.partition(";")[0], do)
    if not facts.config.errors:
        yield ok(f"variables: {', '.join(facts.config.names_set) or 'none is set'}")


@check("config.unknown", fine="no variable that looks like a typo")
def _unknown(facts: Facts) -> Iterator[Said]:
    for name, nearest in facts.config.unknown:
        yield warning(
            f"{name} is not a variable of kvelastic and does nothing",
            f"rename it to {nearest} if that is meant, or unset it (docs/configuration.md)",
        )


@check("config.kvcached", fine="no variable of kvcached")
def _kvcached(facts: Facts) -> Iterable[Said]:
    return map(_legacy, facts.config.legacy)


def _legacy(legacy: LegacyName) -> Said:
    if legacy.successor is None:
        return warning(
            f"{legacy.name} is kvcached's, and does nothing in kvelastic",
            "unset it; docs/configuration.md lists what there is",
        )
    if legacy.is_overruled:
        return warning(
            f"{legacy.name} does nothing, because {legacy.successor} is set, too",
            f"unset {legacy.name}",
        )
    return note(
        f"{legacy.name} is kvcached's, and counts as {legacy.successor}",
        f"rename it to {legacy.successor}",
    )


@check("config.enabled")
def _enabled(facts: Facts) -> Said:
    enabled = facts.config.enabled
    if enabled:
        return ok("engines started from here run on kvelastic")
    return note(
        (
            "ENABLE_KVELASTIC is "
            + ("not set" if enabled is None else "false")
            + ": engines started from here run without kvelastic"
        ),
        "set ENABLE_KVELASTIC=true where the engine is started",
    )


@check("config.tiers", fine="no folder of KVELASTIC_TIERS that a tier cannot use")
def _tier_folders(facts: Facts) -> Iterator[Said]:
    for folder in facts.tier_folders:
        yield problem(
            f"KVELASTIC_TIERS: the {folder.tier} tier cannot use its folder: {folder.problem}",
            "mend that, or name another folder, before the engine starts",
        )


CHECKS: Final = (_values, _unknown, _kvcached, _enabled, _tier_folders)
