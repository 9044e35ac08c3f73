"""The engine of findings: what a check is, and what it says.

    @check("limits.files", fine="open files are enough")
    def _files(facts: Facts) -> Iterator[Said]:
        if facts.limits.open_files == 0:
            yield problem("no file can be opened", "ulimit -n 1024")

A check is a pure function over one view: of the machine (`facts`) or of an instance (its status).
`kvctl doctor` and `kvctl explain` show the same findings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, ParamSpec, TypeAlias

State: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""note: good to know; warning: works, but slower, later or not for long; problem: does not work."""
_P = ParamSpec("_P")


@dataclass(frozen=True)
class Finding:
    """What one check has found. A check that looks at several things gives one finding for each."""

    check: str
    """Stable id, `topic.name`, for programs and for docs/doctor.md."""
    state: State
    what: str
    """The value that was seen, for people."""
    do: str = ""
    """What to do next; empty where nothing has to be done."""
    is_blocked: bool = False
    """Whether it says what something of an instance waits for."""

    @property
    def topic(self) -> str:
        """The part of the id before the dot."""
        return self.check.partition(".")[0]

    @property
    def about(self) -> str:
        """The part of the id after the dot."""
        return self.check.partition(".")[2]


class Said(NamedTuple):
    """A finding to be, without the id of its check."""

    state: State
    what: str
    do: str = ""


ok = functools.partial(Said, "ok")
note = functools.partial(Said, "note")
warning = functools.partial(Said, "warning")
problem = functools.partial(Said, "problem")


def line(
    about: str, what: str, do: str = "", *, is_blocked: bool = False, state: State = "note"
) -> Finding:
    """What is so of an instance, as a sentence; `about` is a word or two: holds, limit, asked."""
    return Finding(f"instances.{about}", state, what, do, is_blocked)


def check(
    name: str, fine: str = ""
) -> Callable[[Callable[_P, Said | Iterable[Said]]], Callable[_P, list[Finding]]]:
    """Decorate what a check looks for, so that it returns findings with that id.

    `{0.name}` in the id stands for the name of the first argument. Where nothing was said,
    `fine` is the finding.
    """

    def decorate(judge: Callable[_P, Said | Iterable[Said]]) -> Callable[_P, list[Finding]]:
        @functools.wraps(judge)
        def findings(*args: _P.args, **kwargs: _P.kwargs) -> list[Finding]:
            said = judge(*args, **kwargs)
            each = [said] if isinstance(said, Said) else list(said) or [ok(fine)] * bool(fine)
            return [Finding(name.format(*args), *one) for one in each]

        return findings

    return decorate
