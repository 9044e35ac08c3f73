"""kvelastic's variables in the environment of this shell."""

from __future__ import annotations

from collections.abc import Iterator

from kvelastic.doctor.facts import Facts, LegacyName
from kvelastic.doctor.finding import Finding


def config_findings(facts: Facts) -> Iterator[Finding]:
    """`config.*`; one finding for each variable that is not well."""
    config = facts.config
    for _, message in config.errors:
        accepted = message.partition("; set it to ")[2]
        yield Finding(
            "config.value",
            "problem",
            message.partition(";")[0],
            f"set it to {accepted.rstrip('.')}"
            if accepted
            else "see docs/configuration.md, or unset it",
        )
    if not config.errors:
        seen = ", ".join(config.names_set) or "none is set"
        yield Finding("config.value", "ok", f"variables: {seen}", "")
    for name, nearest in config.unknown:
        yield Finding(
            "config.unknown",
            "warning",
            f"{name} is not a variable of kvelastic and does nothing",
            f"rename it to {nearest} if that is meant, or unset it (docs/configuration.md)",
        )
    if not config.unknown:
        yield Finding("config.unknown", "ok", "no variable that looks like a typo", "")
    for legacy in config.legacy:
        yield _legacy(legacy)
    if not config.legacy:
        yield Finding("config.kvcached", "ok", "no variable of kvcached", "")
    yield _enabled(facts)


def _legacy(legacy: LegacyName) -> Finding:
    check = "config.kvcached"
    if legacy.successor is None:
        return Finding(
            check,
            "warning",
            f"{legacy.name} is kvcached's, and does nothing in kvelastic",
            "unset it; docs/configuration.md lists what there is",
        )
    if legacy.is_overruled:
        return Finding(
            check,
            "warning",
            f"{legacy.name} does nothing, because {legacy.successor} is set, too",
            f"unset {legacy.name}",
        )
    return Finding(
        check,
        "note",
        f"{legacy.name} is kvcached's, and counts as {legacy.successor}",
        f"rename it to {legacy.successor}",
    )


def _enabled(facts: Facts) -> Finding:
    check, enabled = "config.enabled", facts.config.enabled
    if enabled:
        return Finding(check, "ok", "engines started from here run on kvelastic", "")
    return Finding(
        check,
        "note",
        "ENABLE_KVELASTIC is "
        + ("not set" if enabled is None else "false")
        + ": engines started from here run without kvelastic",
        "set ENABLE_KVELASTIC=true where the engine is started",
    )
