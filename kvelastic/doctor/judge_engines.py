"""The engines that are installed beside kvelastic, and the Python that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic import engine_versions
from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding, State

_OLDEST_PYTHON: Final = (3, 10)
_PLUGIN: Final = "kvelastic"
_REINSTALL: Final = "install kvelastic into the environment that the engine runs in (pip install)"


def engine_findings(facts: Facts) -> Iterator[Finding]:
    """`engines.*`."""
    yield _vllm(facts)
    yield _plugin(facts)
    yield _hooks(facts)
    yield _sglang(facts)
    yield _kvcached(facts)


def _vllm(facts: Facts) -> Finding:
    check, version = "engines.vllm", facts.packages.version("vllm")
    tried = engine_versions.tried(engine_versions.VLLM)
    if version is None:
        return Finding(
            check,
            "note",
            "vLLM is not installed beside this kvctl",
            f"if vLLM is in another environment, {_REINSTALL} and run that kvctl",
        )
    if engine_versions.serves(engine_versions.VLLM, version):
        return Finding(check, "ok", f"vLLM {version}", "")
    # Only an engine that is to run on kvelastic is stopped by it.
    state: State = "problem" if facts.config.enabled and facts.config.is_strict else "warning"
    return Finding(
        check,
        state,
        f"vLLM {version}: kvelastic was tried with {tried}",
        f"install vLLM {tried}; or set KVELASTIC_STRICT=false to try it all the same (what"
        " kvelastic touches is checked first)",
    )


def _plugin(facts: Facts) -> Finding:
    check, packages = "engines.plugin", facts.packages
    if packages.version("vllm") is None:
        return Finding(check, "ok", "not needed: no vLLM here", "")
    if _PLUGIN not in packages.vllm_plugins:
        seen = ", ".join(packages.vllm_plugins) or "none"
        return Finding(
            check,
            "problem",
            f"vLLM does not find kvelastic among its plugins (vllm.general_plugins: {seen})",
            f"{_REINSTALL}; a folder on PYTHONPATH is not enough",
        )
    allowed = facts.config.vllm_plugins
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return Finding(
            check,
            "problem" if facts.config.enabled else "warning",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading kvelastic",
            "add kvelastic to VLLM_PLUGINS, or unset it",
        )
    return Finding(check, "ok", "vLLM finds kvelastic among its plugins", "")


def _hooks(facts: Facts) -> Finding:
    check, hooks = "engines.hooks", facts.packages.vllm_hooks
    if not hooks:
        return Finding(check, "ok", "nothing is hooked: no vLLM here that kvelastic serves", "")
    when = "in" if facts.config.enabled else "with ENABLE_KVELASTIC=true in"
    return Finding(check, "ok", f"{when} this vLLM are hooked: {', '.join(hooks)}", "")


def _sglang(facts: Facts) -> Finding:
    check, version = "engines.sglang", facts.packages.version("sglang")
    if version is None:
        return Finding(check, "ok", "SGLang is not installed beside this kvctl", "")
    return Finding(
        check,
        "note",
        f"SGLang {version}: its own processes are not hooked yet",
        "call kvelastic.integration.sglang.interfaces yourself; ENABLE_KVELASTIC changes nothing"
        " in SGLang",
    )


def _kvcached(facts: Facts) -> Finding:
    check, version = "engines.kvcached", facts.packages.version("kvcached")
    if version is None:
        return Finding(check, "ok", "kvcached is not installed", "")
    seen = f"kvcached {version} is installed, too"
    if facts.config.is_kvcached_enabled:
        return Finding(
            check,
            "problem",
            f"{seen}, and a variable of its own enables it: both would patch the engine",
            "unset ENABLE_KVCACHED and KVCACHED_AUTOPATCH, or pip uninstall kvcached",
        )
    return Finding(check, "note", seen, "pip uninstall kvcached, if it is not used any more")


def python_findings(facts: Facts) -> Iterator[Finding]:
    """`python.*`."""
    packages = facts.packages
    version = ".".join(map(str, packages.python))
    if packages.python[:2] < _OLDEST_PYTHON:
        yield Finding("python.version", "problem", f"Python {version}", "use Python 3.10 or later")
    else:
        yield Finding("python.version", "ok", f"Python {version}", "")
    if packages.native_error:
        yield Finding(
            "python.native",
            "problem",
            f"kvelastic's native module cannot be imported: {packages.native_error}",
            "install kvelastic again with this Python; run from a source folder only after"
            " scripts/setup",
        )
    else:
        yield Finding("python.native", "ok", "kvelastic's native module loads", "")
    torch = packages.version("torch")
    if torch is None:
        yield Finding(
            "python.torch",
            "note",
            "torch is not installed",
            "nothing for kvctl; to make tensors: pip install 'kvelastic[torch]'",
        )
    else:
        yield Finding("python.torch", "ok", f"torch {torch}", "")
