"""Findings and checks.

    @check("limits.files", fine="open files are enough")
    def _files(facts: Facts) -> Iterator[Outcome]:
        if facts.limits.open_files == 0:
            yield problem("no file can be opened", "ulimit -n 1024")

A check is a pure function of the facts of a machine or of the status of an instance. `kvctl doctor`
and `kvctl explain` show the same findings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, ParamSpec, TypeAlias

State: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""note: for information. warning: works, but slowly, late or only for a time. problem: fails."""
_P = ParamSpec("_P")


@dataclass(frozen=True)
class Finding:
    """The result of a check. A check of several objects returns one finding for each."""

    check: str
    """Stable id, `topic.name`, for programs and for docs/doctor.md."""
    state: State
    what: str
    """The observed value, for people."""
    do: str = ""
    """What to do next; empty if no action is needed."""
    is_blocked: bool = False
    """Whether the finding explains why the instance, or a part of it, waits."""

    @property
    def topic(self) -> str:
        """The part of the id before the dot."""
        return self.check.partition(".")[0]

    @property
    def about(self) -> str:
        """The part of the id after the dot."""
        return self.check.partition(".")[2]


class Outcome(NamedTuple):
    """A finding without the id of its check."""

    state: State
    what: str
    do: str = ""


ok = functools.partial(Outcome, "ok")
note = functools.partial(Outcome, "note")
warning = functools.partial(Outcome, "warning")
problem = functools.partial(Outcome, "problem")


def line(
    about: str, what: str, do: str = "", *, is_blocked: bool = False, state: State = "note"
) -> Finding:
    """Return a finding about an instance; `about` is a word or two: holds, limit, asked."""
    return Finding(f"instances.{about}", state, what, do, is_blocked)


def check(
    name: str, fine: str = ""
) -> Callable[[Callable[_P, Outcome | Iterable[Outcome]]], Callable[_P, list[Finding]]]:
    """Decorate a check function so that it returns findings with this id.

    `{0.name}` in the id is replaced by the name of the first argument. If the function returns
    nothing, the finding is `fine`.
    """

    def decorate(judge: Callable[_P, Outcome | Iterable[Outcome]]) -> Callable[_P, list[Finding]]:
        @functools.wraps(judge)
        def findings(*args: _P.args, **kwargs: _P.kwargs) -> list[Finding]:
            outcome = judge(*args, **kwargs)
            each = (
                [outcome]
                if isinstance(outcome, Outcome)
                else list(outcome) or [ok(fine)] * bool(fine)
            )
            return [Finding(name.format(*args), *one) for one in each]

        return findings

    return decorate
