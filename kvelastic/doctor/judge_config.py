"""Findings about kvelastic's environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvelastic.doctor.facts import Facts, LegacyName
from kvelastic.doctor.finding import Outcome, check, note, ok, problem, warning


@check("config.value")
def _values(facts: Facts) -> Iterator[Outcome]:
    for _, message in facts.config.errors:
        accepted = message.partition("; set it to ")[2].rstrip(".")
        do = (
            f"set it to {accepted}"
            if accepted
            else "set it to a value of docs/configuration.md, or unset it"
        )
        yield problem(message.partition(";")[0], do)
    if not facts.config.errors:
        yield ok(f"variables set: {', '.join(facts.config.names_set) or 'none'}")


@check("config.unknown", fine="no variable with a misspelled name")
def _unknown(facts: Facts) -> Iterator[Outcome]:
    for name, nearest in facts.config.unknown:
        yield warning(
            f"{name} is not a variable of kvelastic and has no effect",
            f"rename it to {nearest} or unset it (docs/configuration.md lists all variables)",
        )


@check("config.kvcached", fine="no variable of kvcached is set")
def _kvcached(facts: Facts) -> Iterable[Outcome]:
    return map(_legacy, facts.config.legacy)


def _legacy(legacy: LegacyName) -> Outcome:
    if legacy.successor is None:
        return warning(
            f"{legacy.name} is a variable of kvcached and has no effect in kvelastic",
            "unset it; docs/configuration.md lists kvelastic's variables",
        )
    if legacy.is_overruled:
        return warning(
            f"{legacy.name} has no effect because {legacy.successor} is also set",
            f"unset {legacy.name}",
        )
    return note(
        f"{legacy.name} is a variable of kvcached; kvelastic reads it as {legacy.successor}",
        f"rename it to {legacy.successor}",
    )


@check("config.enabled")
def _enabled(facts: Facts) -> Outcome:
    enabled = facts.config.enabled
    if enabled:
        return ok("engines started in this environment use kvelastic")
    return note(
        (
            "ENABLE_KVELASTIC is "
            + ("not set" if enabled is None else "false")
            + ": engines started in this environment do not use kvelastic"
        ),
        "set ENABLE_KVELASTIC=true in the engine's environment",
    )


@check("config.tiers", fine="all folders of KVELASTIC_TIERS are usable")
def _tier_folders(facts: Facts) -> Iterator[Outcome]:
    for folder in facts.tier_folders:
        yield problem(
            f"KVELASTIC_TIERS: the {folder.tier} tier cannot use its folder: {folder.problem}",
            "correct this or choose another folder before the engine starts",
        )


CHECKS: Final = (_values, _unknown, _kvcached, _enabled, _tier_folders)
