"""Loads kvelastic into engines that have no plugins, by the variable alone.

    ENABLE_KVELASTIC=true python app.py       # kvelastic.pth and kvelastic.start call `at_start`

    from kvelastic.startup import arm         # where Python does not read those files (python -S),
    arm()                                     # as the first lines of the program

Each engine of `kvelastic.engines` that is `loaded_by` a class of its own is armed: once the
process has imported that class's module, to make the first of the class calls the integration's
`plugin.register()`. Its errors are raised there, each time. The import alone loads nothing and
refuses nothing, for programs that serve nothing import such a module, too: vLLM imports
transformers. A process that never does pays for this module, `engines` and `hooks.late_import`,
which import nothing (so keep it). `kvctl doctor` says what keeps an environment from arming.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvelastic.engines import Engine
    from kvelastic.hooks.late_import import Action

_TRUE = ("true", "1", "yes", "on")

failure: Exception | None = None
"""Why `at_start` could not arm; `kvctl doctor` asks a new Python for it."""


def at_start() -> None:
    """Arm as `arm` does, and never raise: Python calls this at its start, for every program."""
    global failure
    try:
        arm()
    except Exception as error:
        failure = error


def arm() -> None:
    """Load kvelastic into each engine that has no plugins, once this process uses it.

    Does nothing unless ENABLE_KVELASTIC (or kvcached's ENABLE_KVCACHED) is set. Call it any number
    of times, from any thread, before the engine is imported. Imports no engine and does not block.
    KVELASTIC_FLEXKV_ALIAS and KVELASTIC_LLM_DATADIST_ALIAS are other matters: each switches on an
    alias, and nothing else.
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
    from kvelastic.hooks.late_import import when_imported

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
    """The class's `__init__`, with `register` before it until that has passed once."""
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
