"""Hooks into an engine as data: the path and the wrapper, whose docstring has the purpose.

    Hook(CORE, "vllm.v1.executor.abstract:Executor.sleep", wrapper)
    arm("vLLM 0.32.0", HOOKS, {CORE: probe_core})

A wrapper is called as `wrapper(original, *args, **kwargs)` instead of the function or class at that
path. A room is named after a module. Its hooks are set when the engine imports the module, after
everything they touch was probed. `kvctl doctor` lists the hooks, and the log names those set.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from kvelastic.integration.hooks.late_import import when_imported

_log = logging.getLogger("kvelastic.integration.hooks")

_entered: set[str] = set()
"""Modules whose hooks are set in this process: a second probe would fail on the wrappers."""


@dataclass(frozen=True)
class Hook:
    """One wrapped function or class of an engine."""

    room: str
    """The module whose import sets the hook."""
    path: str
    """`module:Class.method` or `module:name`."""
    wrapper: Callable[..., Any]
    is_made: bool = False
    """The wrapper is the result of `wrapper(original)`, with its parameters. For functions called
    many times per step, where repacking arguments would be the main cost."""


def arm(engine: str, hooks: Sequence[Hook], probes: Mapping[str, Callable[[], None]]) -> None:
    """Set each room's hooks when the engine imports its module, after the room's probe has passed.

    A room with a probe may have no hooks: a subclass depends on its module.

    `engine` is its name and version, for messages. If a probe fails, it raises
    `UnsupportedEngineError`: no hook of that room is set, and the import fails with the error.
    Idempotent.
    """
    for room, probe in probes.items():
        when_imported(room, functools.partial(_enter, engine, room, hooks, probe))


def _enter(
    engine: str, room: str, hooks: Sequence[Hook], probe: Callable[[], None], _: ModuleType
) -> None:
    if room in _entered:
        return
    probe()
    here = [hook for hook in hooks if hook.room == room]
    for hook in here:
        _set(hook)
    _entered.add(room)
    if not here:
        return
    _log.info(
        "%s, %s: hooked %s.", engine, room, ", ".join(hook.path.split(":")[1] for hook in here)
    )


def _set(hook: Hook) -> None:
    module, _, path = hook.path.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, import_module(module))
    original = getattr(owner, name)
    if not hasattr(original, "kvelastic_original"):
        replacement = hook.wrapper(original) if hook.is_made else _packing(original, hook.wrapper)
        setattr(owner, name, _marked(original, replacement))


def _packing(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return patched


def _marked(original: Callable[..., Any], patched: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(patched, original, updated=())
    patched.kvelastic_original = original  # type: ignore[attr-defined]
    return patched
