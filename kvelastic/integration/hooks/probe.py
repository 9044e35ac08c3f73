"""Checks that an engine is built as the patches expect, before any of them is set.

    require("vLLM 0.32.0", REQUIREMENTS, page="docs/vllm.md")

The requirements are one text. Each line has the path of an object and what must hold there::

    vllm.v1.engine.core:EngineCore.step(self) uses schedule    # its parameters; names in its code
    vllm.v1.core.block_pool:BlockPool.touch(self blocks)       # further parameters have defaults
    module:function takes a b                                  # parameters in any order, and others
    module:Class has a b                                       # fields of a dataclass
    module:Class uses queue only in push pop                   # exactly these methods
    module:Class is another.module:Class                       # one object
    module:Class.attribute                                     # it exists

An indented line continues the one before. All checks run, so that one message names all changes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from types import CodeType
from typing import Any, Final

from kvelastic.errors import IntegrityError, UnsupportedEngineError

WAY_OUT: Final = "Unset ENABLE_KVELASTIC to run this without kvelastic."

_LINE: Final = re.compile(r"([\w.]+:[\w.]+)(?:\(([\w ]*)\))?(?: (takes|has|uses|is) (.+))?")


def refuse(what: str, found: Iterable[str], way_out: str = WAY_OUT) -> None:
    """Raise `UnsupportedEngineError` that lists what was found, unless that is nothing."""
    if lines := "".join(f"  - {line}\n" for line in found):
        raise UnsupportedEngineError(f"{what}\n{lines}{way_out}")


def require(engine: str, text: str, *, page: str) -> None:
    """Check the requirements in `text`. Raises `UnsupportedEngineError` with all that fail.

    `engine` is its name and version; `page` of docs/ names the tested versions.
    """
    probe = Probe(engine, page=page)
    probe.check(text)
    probe.refuse_if_broken()


class Probe:
    """Collects failed requirements. Not thread-safe; used once."""

    def __init__(self, engine: str, *, page: str) -> None:
        """See `require`."""
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

    def check(self, text: str) -> None:
        """Check requirements in the form that the module describes."""
        for line in re.sub(r"\n +", " ", text).splitlines():
            if line and not line.startswith("#"):
                self._check_line(line)

    def _check_line(self, line: str) -> None:
        match = _LINE.fullmatch(line)
        if match is None:
            raise IntegrityError(f"{line!r} is not a requirement that a probe can read")
        path, parameters, what, names = match.groups()
        found = self.get(path)
        if found is None:
            return
        if parameters is not None:
            self._note(path, _faults_of_parameters(found, tuple(parameters.split())))
        if what == "is":
            self.holds(path, found is self.get(names), f"the object at {names}", found)
        elif what is not None:
            self._note(path, _FAULTS[what](found, names))

    def _note(self, path: str, faults: Iterator[str]) -> None:
        self._broken += [f"{path}: expected {fault}" for fault in faults]

    def holds(self, what: str, condition: bool, expected: str, found: object) -> None:
        """Require a condition that the caller has evaluated."""
        if not condition:
            self._broken.append(f"{what}: expected {expected}, found {found}")

    def refuse_if_broken(self) -> None:
        """Raise `UnsupportedEngineError` with all failed requirements, if there are any."""
        refuse(
            f"kvelastic cannot run in this {self._engine}: it is not built as expected.",
            self._broken,
            f"Install a version that kvelastic was tried with ({self._page} names them), or "
            "unset ENABLE_KVELASTIC to run without kvelastic. KVELASTIC_STRICT=false does not "
            "help here.",
        )


def _faults_of_parameters(function: Callable[..., Any], expected: tuple[str, ...]) -> Iterator[str]:
    parameters = list(inspect.signature(function).parameters.values())
    found = tuple(parameter.name for parameter in parameters)
    if found[: len(expected)] != expected:
        yield f"parameters {expected}, found {found}"
        return
    for one in parameters[len(expected) :]:
        is_variable = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if one.default is one.empty and not is_variable:
            yield f"parameters {expected}, found {one.name!r} after them"


def _takes(function: Callable[..., Any], names: str) -> Iterator[str]:
    found = list(inspect.signature(function).parameters)
    if missing := sorted(set(names.split()) - set(found)):
        yield f"the parameters {missing}, found {found}"


def _has(cls: Any, names: str) -> Iterator[str]:
    found = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    if missing := sorted(set(names.split()) - found):
        yield f"the fields {missing}, found {sorted(found)}"


def _uses(user: Any, names: str) -> Iterator[str]:
    """`only in` detects a new method that uses a replaced attribute."""
    attribute, only_in, methods = names.partition(" only in ")
    if only_in:
        found = {name for name, value in vars(user).items() if attribute in _names(_code(value))}
        if found != (expected := set(methods.split())):
            yield f"{attribute!r} to be used by {sorted(expected)}, found {sorted(found)}"
    elif missing := sorted(set(names.split()) - _names(user)):
        yield f"it to use {missing}, found that it does not"


_FAULTS: Final[dict[str, Callable[[Any, str], Iterator[str]]]] = {
    "takes": _takes,
    "has": _has,
    "uses": _uses,
}


def _code(value: object) -> Callable[..., Any] | None:
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
