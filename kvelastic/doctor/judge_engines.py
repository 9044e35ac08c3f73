"""Findings about installed engines and about Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic import engines
from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding, Outcome, State, check, note, ok, problem, warning
from kvelastic.engines import ENGINES, Engine

_OLDEST_PYTHON: Final = (3, 10)
_PLUGIN: Final = "kvelastic"
_REINSTALL: Final = "install kvelastic into the engine's environment (pip install)"


@check("engines.{0.name}")
def _hooked(engine: Engine, facts: Facts) -> Outcome:
    title = engine.title
    version = facts.packages.version(engine.name)
    tried = engines.tried(engine.tried)
    if version is None and (engine.loaded_by or _has_another(engine, facts)):
        return ok(f"{title} is not installed in this environment")
    if version is None:
        return note(
            f"{title} is not installed in this environment",
            f"if {title} is in another environment, {_REINSTALL} and run kvctl there",
        )
    if engines.serves(engine.tried, version):
        return ok(f"{title} {version}")
    seen = f"{title} {version}: kvelastic is tested with {tried}"
    if engines.served_as(engine.tried, version, strict=facts.config.strict) is None:
        way_out = engines.way_out(engine.tried, version)
        return Outcome(
            _refused(engine, facts),
            seen,
            f"install {title} {tried}; or {way_out} to run this version (kvelastic first checks the"
            " functions that it wraps)",
        )
    if facts.config.strict is None:
        return note(
            f"{seen}; it runs if the functions that kvelastic wraps are unchanged",
            "run kvctl doctor --probe to check it, and compare outputs with and without kvelastic",
        )
    return warning(
        seen, f"install {title} {tried}, or run kvctl doctor --probe to check this version"
    )


def _refused(engine: Engine, facts: Facts) -> State:
    """Return the severity of a refused engine: a problem only if it should run on kvelastic.

    An engine without plugins may be only a library of another engine, which keeps running.
    """
    is_library = engine.loaded_by and _has_another(engine, facts)
    return "problem" if facts.config.enabled and not is_library else "warning"


def _has_another(engine: Engine, facts: Facts) -> bool:
    """Return whether another engine, with plugins, is installed."""
    return any(
        other.plugin_group and facts.packages.version(other.name)
        for other in ENGINES
        if other is not engine
    )


@check("engines.loading")
def _loading(engine: Engine, facts: Facts) -> Outcome:
    title, startup = engine.title, facts.startup
    if facts.packages.version(engine.name) is None:
        return ok(f"not needed: {title} is not installed")
    if engine.loading_module in startup.armed:
        what = f"Python loads kvelastic into {title} if ENABLE_KVELASTIC=true"
        return ok(what)
    if startup.failure:
        seen = " ".join(startup.failure.split())
    elif startup.start_files:
        seen = f"it ignores {' and '.join(startup.start_files)}"
    else:
        seen = f"no kvelastic.pth in {' or '.join(startup.site_folders) or 'site-packages'}"
    return Outcome(
        _refused(engine, facts),
        f"Python does not load kvelastic into {title}: {seen}",
        f"{_REINSTALL}; a folder on PYTHONPATH is not enough; or call"
        " kvelastic.startup.arm() at the start of the program",
    )


@check("engines.plugin")
def _plugin(engine: Engine | None, facts: Facts) -> Outcome:
    if engine is None:
        titles = " or ".join(engine.title for engine in ENGINES if engine.plugin_group)
        return ok(f"not needed: no {titles} is installed")
    packages, title = facts.packages, engine.title
    found = dict(packages.plugins).get(engine.name, ())
    if _PLUGIN not in found:
        return problem(
            f"{title} does not find the plugin kvelastic"
            f" ({engine.plugin_group}: {', '.join(found) or 'none'})",
            f"{_REINSTALL}; a folder on PYTHONPATH is not enough",
        )
    allowed, variable = dict(facts.config.allowed_plugins).get(engine.name), engine.plugins_variable
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return Outcome(
            ("problem" if facts.config.enabled else "warning"),
            f"{variable}={allowed!r} prevents {title} from loading kvelastic",
            f"add kvelastic to {variable}, or unset it",
        )
    return ok(f"{title} finds the plugin kvelastic")


@check("engines.hooks")
def _hooks(engine: Engine, facts: Facts) -> Outcome:
    if facts.packages.native_error:
        return ok(f"not checked in {engine.title}: see python.native")
    hooks = dict(facts.packages.hooks).get(engine.name)
    if not hooks:
        what = f"no functions to wrap: no supported {engine.title} is installed"
        return ok(what)
    when = "" if facts.config.enabled else " if ENABLE_KVELASTIC=true"
    return ok(f"kvelastic wraps {len(hooks)} functions of {engine.title}{when}: {', '.join(hooks)}")


@check("engines.probe", fine="nothing to check: no supported engine is installed")
def _probes(facts: Facts) -> Iterator[Outcome]:
    for probe in facts.probes or ():
        engine = engines.find(probe.engine)
        version = f"{engine.title} {facts.packages.version(engine.name)}"
        another = f"install {engine.title} {engines.tried(engine.tried)}"
        for difference in _differences(probe.broken):
            what = f"kvelastic cannot run in {version}: {difference}"
            yield Outcome(_refused(engine, facts), what, another)
        for missed in probe.missed:
            yield note(
                f"{version}: a module cannot be imported here and was not checked: {missed}",
                "ignore this if the module is for another device; otherwise set what the engine"
                " needs to start",
            )
        if probe.failure:
            what = f"{version} could not be checked: {probe.failure}"
            yield warning(what, "check that the engine starts without kvelastic")
        elif not probe.broken:
            what = f"{version} is compatible: kvelastic wrapped {probe.hooked} functions"
            yield ok(what)


def _differences(messages: tuple[str, ...]) -> Iterator[str]:
    """Return the lines of each message's list, or the whole message if it has no list."""
    for message in messages:
        listed = [line[4:] for line in message.splitlines() if line.startswith("  - ")]
        yield from listed or [" ".join(message.split())]


@check("engines.{0.name}")
def _not_hooked(engine: Engine, facts: Facts) -> Outcome:
    title = engine.title
    version = facts.packages.version(engine.name)
    if version is None:
        return ok(f"{title} is not installed in this environment")
    return note(
        f"{title} {version}: kvelastic does not support its processes yet",
        f"call {engine.interfaces} yourself; ENABLE_KVELASTIC has no effect in {title}",
    )


@check("engines.kvcached")
def _kvcached(facts: Facts) -> Outcome:
    version = facts.packages.version("kvcached")
    if version is None:
        return ok("kvcached is not installed")
    seen = f"kvcached {version} is also installed"
    if facts.config.is_kvcached_enabled:
        return problem(
            f"{seen} and enabled by its own variable: both would patch the engine",
            "unset ENABLE_KVCACHED and KVCACHED_AUTOPATCH, or run pip uninstall kvcached",
        )
    return note(seen, "run pip uninstall kvcached if it is no longer used")


@check("python.version")
def _python(facts: Facts) -> Outcome:
    seen = f"Python {'.'.join(map(str, facts.packages.python))}"
    is_old = facts.packages.python[:2] < _OLDEST_PYTHON
    return problem(seen, "use Python 3.10 or later") if is_old else ok(seen)


@check("python.native")
def _native(facts: Facts) -> Outcome:
    if not facts.packages.native_error:
        return ok("kvelastic's native module loads")
    return problem(
        f"kvelastic's native module cannot be imported: {facts.packages.native_error}",
        "reinstall kvelastic with this Python; in a source folder, run scripts/setup first",
    )


@check("python.torch")
def _torch(facts: Facts) -> Outcome:
    torch = facts.packages.version("torch")
    if torch is not None:
        return ok(f"torch {torch}")
    return note(
        "torch is not installed",
        "ignore this for kvctl; to create tensors, run pip install 'kvelastic[torch]'",
    )


def _engines(facts: Facts) -> Iterator[Finding]:
    for engine in ENGINES:
        if engine.tried:
            yield from _hooked(engine, facts)
            if engine.loaded_by:
                yield from _loading(engine, facts)
            yield from _hooks(engine, facts)
        else:
            yield from _not_hooked(engine, facts)
    with_plugins = [e for e in ENGINES if e.plugin_group and facts.packages.version(e.name)]
    for engine_with_plugins in with_plugins or (None,):
        yield from _plugin(engine_with_plugins, facts)
    if facts.probes is not None:
        yield from _probes(facts)


CHECKS: Final = (_engines, _kvcached, _python, _native, _torch)
