"""The argument types of kvctl: names, tiers, sizes, percentages, times; and `--wait`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvelastic.units import parse_age_s, parse_percent, parse_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kvelastic.cli.controller_calls import RemoteController

_MOST_S: Final = 365 * 86400
"""Maximum time in seconds. Python's waits raise an `OverflowError` beyond 292 years."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class NameType(click.ParamType):  # type: ignore[type-arg]
    """A segment's name. Shell completion offers the live segments."""

    name = "name"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with the typed text; none for another machine."""
        from kvelastic.shared.segment import list_segments

        if ctx.find_root().params.get("address") is not None:
            return []
        return offered((info.name for info in list_segments()), incomplete)


class ParsedType(click.ParamType):  # type: ignore[type-arg]
    """Text that a function of `kvelastic.units` parses. If it raises, that is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; anything else is a usage error (exit code 2)."""
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LimitType(ParsedType):
    """A size, or `none` for no limit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return bytes, `UNLIMITED_BYTES` for `none`; a bad size is a usage error (exit code 2)."""
        if str(value).strip().lower() == "none":
            from kvelastic.instance.status import UNLIMITED_BYTES

            return UNLIMITED_BYTES
        if str(value).strip().endswith("%"):
            self.fail(f"{value!r} is not a size; use kvctl limit-percent NAME {value}", param, ctx)
        return super().convert(value, param, ctx)


SIZE: Final = ParsedType("size", parse_size)
LIMIT: Final = LimitType("size", parse_size)
PERCENT: Final = ParsedType("percent", parse_percent)
AGE: Final = ParsedType("age", parse_age_s)


class SecondsType(click.ParamType):  # type: ignore[type-arg]
    """A time in seconds, at least `least_s`, and at most a year."""

    name = "seconds"

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds; anything else is a usage error (exit code 2)."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not self.least_s <= seconds <= _MOST_S:
            self.fail(f"{value!r} must be {self.least_s:g} to {_MOST_S} seconds", param, ctx)
        return seconds


class TierType(click.ParamType):  # type: ignore[type-arg]
    """A tier of the instance in the preceding argument. Shell completion offers its tiers."""

    name = "tier"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the tiers that begin with the typed text."""
        from kvelastic.errors import SegmentError
        from kvelastic.shared.segment import inspect
        from kvelastic.shared.tier_status import read

        try:
            shown = read(inspect(str(ctx.params.get("name", ""))))
        except SegmentError:
            return []
        tiers = [one.tier for one in shown.tiers] if shown is not None else []
        return offered(tiers, incomplete)


class ValueCommand(click.Command):
    """A command that reports `-5` as an invalid value instead of an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `BadParameter` for a negative number such as `-5`."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name[1:2].isdigit() or error.option_name[1:2] == ".":
                raise click.BadParameter(
                    "a negative value is not accepted; write a number from 0 up.", ctx=ctx
                ) from None
            raise


def offered(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the `names` that begin with the typed text, for shell completion.

    Invalid instance names are omitted. Other users choose the names of their files, and bash
    inserts completions unquoted into the command line, so `$(id)` would run.
    """
    from click.shell_completion import CompletionItem

    from kvelastic.shared.segment import is_name

    return [CompletionItem(one) for one in names if is_name(one) and one.startswith(incomplete)]


def wait_option(until: str) -> Callable[[_Command], _Command]:
    """Return the option `--wait SECONDS` (parameter `wait_s`); its help text contains `until`."""
    return click.option(
        "--wait",
        "wait_s",
        type=SecondsType(0),
        metavar="SECONDS",
        help=f"Wait until {until}, at most this long.",
    )


def remote_controller() -> RemoteController | None:
    """Return the controller that `--address` names; None: the command is for this machine."""
    context = click.get_current_context(silent=True)
    address = None if context is None else context.find_root().params.get("address")
    if address is None:
        return None
    from kvelastic.cli.controller_calls import RemoteController

    return RemoteController(address)
