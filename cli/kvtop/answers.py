"""What came of a change made by keys, in one line of the screen.

message, mood = answer_line(ask, answer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.cli.kvtop.keys import Ask, Mood
from kvelastic.cli.outcome_text import outcome_text
from kvelastic.instance.outcome import HOLDS, MAY_HOLD, outcome_of
from kvelastic.segment import Request

if TYPE_CHECKING:
    from kvelastic.segment import Answer


def request_of(ask: Ask) -> Request:
    """The request that a key makes."""
    return Request(
        limit_bytes=ask.value if ask.setting == "limit" else None,
        min_bytes=ask.value if ask.setting == "min" else None,
        priority=ask.value if ask.setting == "priority" else None,
        asleep=bool(ask.value) if ask.setting == "sleep" else None,
    )


def answer_line(ask: Ask, answer: Answer) -> tuple[str, Mood]:
    """Say what came of it, and whether that is good."""
    request = request_of(ask)
    outcome = outcome_of(request, answer)
    mood: Mood = "bad"
    if outcome.verdict in HOLDS and not outcome.engine_asleep:
        mood = "good"
    elif outcome.verdict in HOLDS | MAY_HOLD:
        mood = "warn"
    return outcome_text(ask.label, request, outcome, answer, exact=False), mood
