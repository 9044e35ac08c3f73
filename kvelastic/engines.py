"""The table of engines, used by the rest of kvelastic.

    for engine in ENGINES: print(engine.title, tried(engine.tried))
    find("vllm").shapes()            # imports and returns the module that reads its cache shapes

To support another engine, add a row here and a folder `kvelastic/integration/NAME`. The folder has
`interfaces` and `shapes` if the package kvcached has functions for the engine, and `plugin` and
`patches` if the engine's processes are hooked. This module imports an integration's modules on
demand. Neither it nor they import the engine itself.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, Final


class Engine:
    """One engine. Do not modify it.

    Not a dataclass: Python reads this table at startup (`kvelastic.startup`), and importing
    `dataclasses` would make that ten times slower in every process.
    """

    name: Final[str]
    """Name in kvcached's functions; also the name of its distribution, module and folder."""
    title: Final[str]
    """Name for people."""
    tried: Final[tuple[str, ...]]
    """Series that kvelastic was tested with, as the first numbers of their versions: two, or three
    if an engine changes between patch releases. Empty: not hooked."""
    plugin_group: Final[str]
    """Entry point group by which the engine loads kvelastic, if it has plugins."""
    plugins_variable: Final[str]
    """Environment variable that lists the plugins it may load."""
    loaded_by: Final[str]
    """`module:Class` of an engine without plugins. Its first instance loads kvelastic into the
    process (`kvelastic.startup`), and fails if that fails."""
    version_module: Final[str]
    """Module with its `__version__` and few imports."""
    has_interfaces: Final[bool]
    """Whether kvcached has functions for it, so that its folder has `interfaces` and `shapes`."""

    def __init__(
        self,
        name: str,
        title: str,
        *,
        tried: tuple[str, ...] = (),
        plugin_group: str = "",
        plugins_variable: str = "",
        loaded_by: str = "",
        version_module: str = "",
        has_interfaces: bool = True,
    ) -> None:
        self.name = name
        self.title = title
        self.tried = tried
        self.plugin_group = plugin_group
        self.plugins_variable = plugins_variable
        self.loaded_by = loaded_by
        self.version_module = version_module or name
        self.has_interfaces = has_interfaces

    @property
    def interfaces(self) -> str:
        """Name of the module with kvcached's functions for the engine."""
        return f"kvelastic.integration.{self.name}.interfaces"

    @property
    def loading_module(self) -> str:
        """The module name in `loaded_by`."""
        return self.loaded_by.partition(":")[0]

    @property
    def loading_class(self) -> str:
        """The class name in `loaded_by`."""
        return self.loaded_by.partition(":")[2]

    def shapes(self) -> Any:
        """Import and return the module with the engine's `tensor_views.EngineShapes`."""
        return _module_of(self.name, "shapes")

    def plugin(self) -> Any:
        """Import and return the module whose `register()` hooks kvelastic into its processes."""
        return _module_of(self.name, "plugin")

    def hooks(self, version: str) -> tuple[str, ...]:
        """Return the functions wrapped in that version; empty if it is refused by default."""
        if served_as(self.tried, version, strict=None) is None:
            return ()
        return tuple(hook.path.partition(":")[2] for hook in self._table(version))

    def rooms(self, version: str) -> dict[str, int]:
        """Return the number of wrapped functions by the module whose import wraps them.

        Modules that are only probed have 0. For an unsupported version, uses the nearest series.
        """
        rooms = [hook.room for hook in self._table(version)]
        only_probed = getattr(_module_of(self.name, "patches"), "PROBED_ONLY", ())
        return {room: rooms.count(room) for room in (*rooms, *only_probed)}

    def _table(self, version: str) -> Any:
        series = series_in(self.tried, version) or nearest_series(self.tried, version)
        return _module_of(self.name, "patches").hooks_for(series)


def _module_of(name: str, module: str) -> Any:
    from importlib import import_module

    return import_module(f"kvelastic.integration.{name}.{module}")


ENGINES: Final = (
    Engine(
        "vllm",
        "vLLM",
        tried=("0.32", "0.33"),
        plugin_group="vllm.general_plugins",
        plugins_variable="VLLM_PLUGINS",
        version_module="vllm.version",
    ),
    Engine(
        "sglang",
        "SGLang",
        tried=("0.5.23",),  # its schedulers differ between patch releases
        plugin_group="sglang.srt.plugins",
        plugins_variable="SGLANG_PLUGINS",
        version_module="sglang.version",
    ),
    Engine(
        "transformers",
        "transformers",
        tried=("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"),
        # Created in the caller's thread. Its cache is created in a thread whose errors do not end a
        # call.
        loaded_by="transformers.generation.continuous_batching:ContinuousBatchingManager",
        has_interfaces=False,
    ),
)


def find(name: str) -> Engine:
    """Return the engine `name`. Raises `InvalidArgumentError`, which lists the known names."""
    return _find(name, ENGINES)


def find_with_interfaces(name: str) -> Engine:
    """Return an engine like `find`, but only one for which kvcached has functions."""
    return _find(name, [engine for engine in ENGINES if engine.has_interfaces])


def _find(name: str, among: Collection[Engine]) -> Engine:
    from kvelastic.errors import InvalidArgumentError

    for engine in among:
        if engine.name == name:
            return engine
    known = " or ".join(engine.name for engine in among)
    raise InvalidArgumentError(f"engine={name!r} is not accepted; it must be {known}.")


def series_in(table: Collection[str], version: str) -> str | None:
    """Return the series of `version` (`0.32.0+cpu`: `0.32`), or None if it is not in the table."""
    numbers = _numbers(version)
    for series in table:
        wanted = _numbers(series)
        if wanted and numbers[: len(wanted)] == wanted:
            return series
    return None


def serves(table: Collection[str], version: str) -> bool:
    """Return whether `version` belongs to a series of the table."""
    return series_in(table, version) is not None


def served_as(table: Collection[str], version: str, *, strict: bool | None) -> str | None:
    """Return the series whose hooks and probes apply to `version`, or None if it is refused.

    A version of the table has its own series. `strict` (`KVELASTIC_STRICT`) decides about others:
    True refuses them; None accepts a newer release of the newest series' major version, because
    most releases change nothing that kvelastic touches; False accepts any. An accepted one gets
    the newest series that is not newer than it, else the oldest.
    """
    series = series_in(table, version)
    if series is not None or strict or not table:
        return series
    if strict is None:
        newest, numbers = max(map(_numbers, table)), _numbers(version)
        if numbers[:1] != newest[:1] or numbers < newest:
            return None
    return nearest_series(table, version)


def way_out(table: Collection[str], version: str) -> str:
    """Return what an operator does with `KVELASTIC_STRICT` to run a refused version."""
    is_newer = served_as(table, version, strict=None) is not None
    return "unset KVELASTIC_STRICT" if is_newer else "set KVELASTIC_STRICT=false"


def tried(table: Collection[str]) -> str:
    """Format a table of series for people: `0.31.x, 0.32.x`, or `none`."""
    return ", ".join(each if each.count(".") > 1 else f"{each}.x" for each in table) or "none"


def nearest_series(table: Collection[str], version: str) -> str:
    """Return the newest series that is not newer than `version`, else the oldest one.

    Raises ValueError for an empty table.
    """
    wanted = _numbers(version)
    older = [series for series in table if _numbers(series) <= wanted]
    return max(older, key=_numbers) if older else min(table, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    """Return (0, 32, 0) for `0.32.0+cpu`; empty if the text does not start with a number."""
    import re

    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
