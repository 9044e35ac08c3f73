"""Loads kvelastic into engines that have no plugins, enabled by environment variables.

    ENABLE_KVELASTIC=true python app.py       # kvelastic.pth and kvelastic.start call `at_start`

    from kvelastic.startup import arm         # if Python does not read those files (python -S),
    arm()                                     # as the first lines of the program

Each engine of `kvelastic.engines` with a `loaded_by` class is armed: once the process has imported
the class's module, the first instance of the class calls the integration's `plugin.register()`.
Errors are raised there, for each new instance. The import alone loads nothing and raises nothing,
because programs that serve no model import such modules too: vLLM imports transformers. A process
that never serves imports only this module, `engines` and `hooks.late_import`. Keep these free of
other imports. `kvctl doctor` reports why an environment does not arm.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvelastic.engines import Engine
    from kvelastic.integration.hooks.late_import import Action

_TRUE = ("true", "1", "yes", "on")

failure: Exception | None = None
"""Why `at_start` could not arm; `kvctl doctor` reads it in a new Python process."""


def at_start() -> None:
    """Call `arm`; store its exception in `failure`. Every Python program calls this at startup."""
    global failure
    try:
        arm()
    except Exception as error:
        failure = error


def arm() -> None:
    """Load kvelastic into each engine without plugins, once this process uses the engine.

    Has no effect on engines unless ENABLE_KVELASTIC (or kvcached's ENABLE_KVCACHED) is set.
    Idempotent and thread-safe; call it before the engine is imported. Imports no engine and never
    blocks. KVELASTIC_FLEXKV_ALIAS and KVELASTIC_LLM_DATADIST_ALIAS are independent: each only
    switches on an alias.
    """
    if os.environ.get("KVELASTIC_FLEXKV_ALIAS", "").strip().lower() in _TRUE:
        from kvelastic.flexkv import alias

        alias.switch_on()
    if os.environ.get("KVELASTIC_LLM_DATADIST_ALIAS", "").strip().lower() in _TRUE:
        from kvelastic import datadist_alias

        datadist_alias.switch_on()
    if not (os.environ.get("ENABLE_KVELASTIC") or os.environ.get("ENABLE_KVCACHED")):
        return
    from kvelastic.engines import ENGINES
    from kvelastic.integration.hooks.late_import import when_imported

    for engine in ENGINES:
        if engine.loaded_by:
            when_imported(engine.loading_module, _loading(engine))


def _loading(engine: Engine) -> Action:
    def wrap(module: ModuleType) -> None:
        loading = getattr(module, engine.loading_class, None)
        if loading is None:
            import logging

            logging.getLogger("kvelastic").warning(
                "This %s has no %s: it runs without kvelastic, which was tried with %s.",
                engine.title,
                engine.loaded_by,
                ", ".join(engine.tried),
            )
        elif not hasattr(loading.__init__, "kvelastic_engine"):
            loading.__init__ = _registering(engine, loading.__init__)

    return wrap


def _registering(engine: Engine, original: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of `__init__` that first calls `register`, until it has succeeded once."""
    import functools
    from threading import Lock

    lock = Lock()
    is_registered = False

    @functools.wraps(original)
    def init(*args: object, **kwargs: object) -> None:
        nonlocal is_registered
        with lock:
            if not is_registered:
                _register(engine)
                is_registered = True
        original(*args, **kwargs)

    init.kvelastic_engine = engine  # type: ignore[attr-defined]
    return init


def _register(engine: Engine) -> None:
    from kvelastic.errors import EngineError, KvelasticError

    try:
        engine.plugin().register()
    except KvelasticError:
        raise
    except Exception as error:
        raise EngineError(
            f"kvelastic could not be loaded into {engine.title}: {type(error).__name__}: {error}."
            " kvctl doctor looks for the reason; unset ENABLE_KVELASTIC to run"
            f" {engine.title} without kvelastic."
        ) from error
