"""The engines that there are: the one table by which the rest of kvelastic knows of them.

    for engine in ENGINES: print(engine.title, tried(engine.tried))
    find("vllm").shapes()            # how its cache shapes are read; imported only now

A new engine is a row here and a folder `kvelastic/integration/NAME` with `interfaces`, `shapes`
and, where its own processes are hooked, `patches`. No engine is imported here, and an integration's
modules only when they are asked for; they import no engine either.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvelastic.errors import InvalidArgumentError


@dataclass(frozen=True)
class Engine:
    """One engine."""

    name: str
    """As callers of kvcached's functions name it; its distribution, its module and its folder."""
    title: str
    """For people."""
    tried: tuple[str, ...] = ()
    """Series (major.minor) that kvelastic was tried with."""
    plugin_group: str = ""
    """Entry points by which it loads kvelastic into its processes; empty: it is not hooked."""
    plugins_variable: str = ""
    """Environment variable that names the plugins it may load."""

    @property
    def interfaces(self) -> str:
        """The module with kvcached's functions for it."""
        return f"kvelastic.integration.{self.name}.interfaces"

    def shapes(self) -> Any:
        """The module that reads its cache shapes; see `kvelastic.views.EngineShapes`."""
        return import_module(f"kvelastic.integration.{self.name}.shapes")

    def hooks(self, version: str) -> tuple[str, ...]:
        """What is wrapped in that version; nothing in one that is not served."""
        if not self.plugin_group or not serves(self.tried, version):
            return ()
        table = import_module(f"kvelastic.integration.{self.name}.patches").HOOKS
        return tuple(hook.path.partition(":")[2] for hook in table)


ENGINES: Final = (
    Engine(
        "vllm",
        "vLLM",
        tried=("0.32", "0.33"),
        plugin_group="vllm.general_plugins",
        plugins_variable="VLLM_PLUGINS",
    ),
    Engine("sglang", "SGLang"),
)


def find(name: str) -> Engine:
    """The engine of that name. Raises `InvalidArgumentError`, which names those that there are."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    known = " or ".join(engine.name for engine in ENGINES)
    raise InvalidArgumentError(f"engine={name!r} is not accepted; it must be {known}.")


def series_of(version: str) -> str | None:
    """`0.32` of `0.32.0+cpu`; None for a text that does not start with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return f"{found[1]}.{found[2]}" if found else None


def serves(table: Collection[str], version: str) -> bool:
    """Whether `version` belongs to a series of the table."""
    return series_of(version) in table


def tried(table: Collection[str]) -> str:
    """The table for people: `0.31.x, 0.32.x`, or `none`."""
    return ", ".join(f"{series}.x" for series in table) or "none"


def nearest_series(table: Collection[str], version: str) -> str:
    """The newest series that is not newer than `version`, else the oldest one.

    Raises ValueError for an empty table.
    """
    wanted = _numbers(series_of(version))
    older = [series for series in table if _numbers(series) <= wanted]
    return max(older, key=_numbers) if older else min(table, key=_numbers)


def _numbers(series: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in series.split(".")) if series else ()
