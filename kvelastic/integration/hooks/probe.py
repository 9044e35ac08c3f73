"""Checks that an engine is built as the patches expect, before any of them is set.

    probe = Probe("vLLM 0.32.0", page="docs/vllm.md")
    probe.parameters("vllm.v1.core.block_pool:BlockPool.touch", "self blocks")
    probe.holds("...", condition, "what was expected", "what was found")
    probe.refuse_if_broken()

All checks run, so that one message tells everything that has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from types import CodeType
from typing import Any

from kvelastic.errors import UnsupportedEngineError


class Probe:
    """Collects failed requirements. Not thread-safe; used once.

    Several names are one text, with spaces between them.
    """

    def __init__(self, engine: str, *, page: str) -> None:
        """`engine` is its name and version; `page` of docs/ names the tested versions."""
        self._engine = engine
        self._page = page
        self._broken: list[str] = []

    def get(self, path: str) -> Any:
        """Return the object at `module:Name.attribute`; if missing, None and the probe breaks."""
        module, _, names = path.partition(":")
        try:
            return reduce(getattr, names.split("."), import_module(module))
        except (ImportError, AttributeError) as error:
            self._broken.append(f"{path}: expected to exist, found {error}")
            return None

    def parameters(self, path: str, names: str) -> None:
        """Require parameters with these names in this order. Further ones must have defaults."""
        function = self.get(path)
        if function is None:
            return
        expected = tuple(names.split())
        parameters = list(inspect.signature(function).parameters.values())
        found = tuple(parameter.name for parameter in parameters)
        if found[: len(expected)] != expected:
            self._broken.append(f"{path}: expected parameters {expected}, found {found}")
            return
        for parameter in parameters[len(expected) :]:
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if not optional:
                self._broken.append(
                    f"{path}: expected parameters {expected}, found {parameter.name!r} after them"
                )

    def takes(self, path: str, names: str) -> None:
        """Require parameters with the given names, in any order and among others."""
        function = self.get(path)
        if function is None:
            return
        found = list(inspect.signature(function).parameters)
        missing = sorted(set(names.split()) - set(found))
        if missing:
            self._broken.append(f"{path}: expected the parameters {missing}, found {found}")

    def fields(self, path: str, names: str) -> None:
        """Require a dataclass with at least these fields."""
        cls = self.get(path)
        if cls is None:
            return
        found = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
        missing = sorted(set(names.split()) - found)
        if missing:
            self._broken.append(f"{path}: expected the fields {missing}, found {sorted(found)}")

    def users(self, path: str, attribute: str, names: str) -> None:
        """Require that exactly these methods of the class use `attribute`.

        This detects a new method that uses a replaced attribute.
        """
        cls = self.get(path)
        if cls is None:
            return
        found = {name for name, value in vars(cls).items() if attribute in _names(_function(value))}
        expected = set(names.split())
        if found != expected:
            self._broken.append(
                f"{path}: expected {attribute!r} to be used by {sorted(expected)}, "
                f"found {sorted(found)}"
            )

    def mentions(self, path: str, names: str) -> None:
        """Require that the function's code calls or reads these names."""
        function = self.get(path)
        if function is None:
            return
        missing = sorted(set(names.split()) - _names(function))
        if missing:
            self._broken.append(f"{path}: expected it to use {missing}, found that it does not")

    def holds(self, what: str, condition: bool, expected: str, found: object) -> None:
        """Require a condition that the caller has evaluated."""
        if not condition:
            self._broken.append(f"{what}: expected {expected}, found {found}")

    def refuse_if_broken(self) -> None:
        """Raise `UnsupportedEngineError` with all failed requirements, if there are any."""
        if not self._broken:
            return
        raise UnsupportedEngineError(
            f"kvelastic cannot run in this {self._engine}: it is not built as expected.\n"
            + "\n".join(f"  - {line}" for line in self._broken)
            + f"\nInstall a version that kvelastic was tried with ({self._page} names them), or "
            "unset ENABLE_KVELASTIC to run without kvelastic. KVELASTIC_STRICT=false does not "
            "help here."
        )


def _function(value: object) -> Callable[..., Any] | None:
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    return value if inspect.isfunction(value) else None


def _names(function: Callable[..., Any] | None) -> set[str]:
    """Return every name and attribute in a function's code and its nested functions."""
    if function is None:
        return set()
    found: set[str] = set()
    waiting = [inspect.unwrap(function).__code__]
    while waiting:
        code = waiting.pop()
        found.update(code.co_names)
        waiting.extend(const for const in code.co_consts if isinstance(const, CodeType))
    return found
