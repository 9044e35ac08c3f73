"""The engines that there are: the one table by which the rest of kvelastic knows of them.

    for engine in ENGINES: print(engine.title, tried(engine.tried))
    find("vllm").shapes()            # how its cache shapes are read; imported only now

A new engine is a row here and a folder `kvelastic/integration/NAME`: with `interfaces` and `shapes`
where kvcached has functions for it, with `plugin` and `patches` where its own processes are hooked.
No engine is imported here, and an integration's modules only when they are asked for; they import
no engine either.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, Final


class Engine:
    """One engine; not changed once it is made.

    No dataclass: Python reads this table at its start (`kvelastic.startup`), and importing
    `dataclasses` would cost every process ten times what it costs now.
    """

    name: Final[str]
    """As callers of kvcached's functions name it; its distribution, its module and its folder."""
    title: Final[str]
    """For people."""
    tried: Final[tuple[str, ...]]
    """Series that kvelastic was tried with, each the first numbers of its versions: two, or three
    where an engine changes from one patch to the next. Empty: it is not hooked."""
    plugin_group: Final[str]
    """Entry points by which it loads kvelastic into its processes, where it has plugins."""
    plugins_variable: Final[str]
    """Environment variable that names the plugins it may load."""
    loaded_by: Final[str]
    """`module:Class` of its own, for one without plugins: to make the first of that class loads
    kvelastic into the process (`kvelastic.startup`), and is refused where that fails."""
    version_module: Final[str]
    """Module that has its `__version__` and imports the least."""
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
        """The module with kvcached's functions for it."""
        return f"kvelastic.integration.{self.name}.interfaces"

    @property
    def loading_module(self) -> str:
        """The module in `loaded_by`."""
        return self.loaded_by.partition(":")[0]

    @property
    def loading_class(self) -> str:
        """The class in `loaded_by`."""
        return self.loaded_by.partition(":")[2]

    def shapes(self) -> Any:
        """The module that reads its cache shapes; see `kvelastic.views.EngineShapes`."""
        return _module_of(self.name, "shapes")

    def plugin(self) -> Any:
        """The module whose `register()` hooks kvelastic into a process of its own."""
        return _module_of(self.name, "plugin")

    def hooks(self, version: str) -> tuple[str, ...]:
        """What is wrapped in that version; nothing in one that is not served."""
        if not serves(self.tried, version):
            return ()
        return tuple(hook.path.partition(":")[2] for hook in self._table(version))

    def rooms(self, version: str) -> dict[str, int]:
        """How many functions are wrapped by which module, when the engine imports it.

        Of a version that is not served: of the series next to it.
        """
        rooms = [hook.room for hook in self._table(version)]
        return {room: rooms.count(room) for room in rooms}

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
        tried=("0.5.23",),  # its schedulers differ from one patch to the next
        plugin_group="sglang.srt.plugins",
        plugins_variable="SGLANG_PLUGINS",
        version_module="sglang.version",
    ),
    Engine(
        "transformers",
        "transformers",
        tried=("5.17", "5.18", "5.19"),
        # Made in the caller's thread; its cache is made in a thread whose errors end no call.
        loaded_by="transformers.generation.continuous_batching:ContinuousBatchingManager",
        has_interfaces=False,
    ),
)


def find(name: str) -> Engine:
    """The engine of that name. Raises `InvalidArgumentError`, which names those that there are."""
    return _find(name, ENGINES)


def find_with_interfaces(name: str) -> Engine:
    """The same among those that kvcached has functions for."""
    return _find(name, [engine for engine in ENGINES if engine.has_interfaces])


def _find(name: str, among: Collection[Engine]) -> Engine:
    from kvelastic.errors import InvalidArgumentError

    for engine in among:
        if engine.name == name:
            return engine
    known = " or ".join(engine.name for engine in among)
    raise InvalidArgumentError(f"engine={name!r} is not accepted; it must be {known}.")


def series_in(table: Collection[str], version: str) -> str | None:
    """The series of the table to which `version` belongs (`0.32.0+cpu`: `0.32`); None: to none."""
    numbers = _numbers(version)
    for series in table:
        wanted = _numbers(series)
        if wanted and numbers[: len(wanted)] == wanted:
            return series
    return None


def serves(table: Collection[str], version: str) -> bool:
    """Whether `version` belongs to a series of the table."""
    return series_in(table, version) is not None


def tried(table: Collection[str]) -> str:
    """The table for people: `0.31.x, 0.32.x`, or `none`."""
    return ", ".join(each if each.count(".") > 1 else f"{each}.x" for each in table) or "none"


def nearest_series(table: Collection[str], version: str) -> str:
    """The newest series that is not newer than `version`, else the oldest one.

    Raises ValueError for an empty table.
    """
    wanted = _numbers(version)
    older = [series for series in table if _numbers(series) <= wanted]
    return max(older, key=_numbers) if older else min(table, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 32, 0) of `0.32.0+cpu`; nothing of a text that does not start with a number."""
    import re

    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
