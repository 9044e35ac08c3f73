"""What an instance's answer comes to, in one line of the screen.

message, mood = answer_line(ask, answer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.cli.kvtop.keys import Ask, Mood, value_text, wish_text
from kvelastic.cli.rows import printable
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from kvelastic.segment import Answer


def answer_line(ask: Ask, answer: Answer) -> tuple[str, Mood]:
    """Say what came of a wish, and whether that is good."""
    wished = f"{ask.label}: {wish_text(ask.setting, ask.value)}"
    if answer.state == "none":
        return f"{wished} is wished; the instance has not answered yet", "warn"
    if answer.state == "failed":
        return f"{ask.label}: its memory has failed: {printable(answer.reason)}", "bad"
    obstacle = _obstacle(ask, answer)
    if obstacle:
        return f"{wished} {obstacle}", "bad"
    asleep = " it is asleep, and" if answer.asleep else ""
    if answer.state == "shrinking":
        over = format_size(answer.over_bytes)
        return f"{wished} is accepted;{asleep} {over} are still to be given back", "warn"
    return f"{wished} applied;{asleep} {format_size(answer.mapped_bytes)} are mapped", "good"


def _obstacle(ask: Ask, answer: Answer) -> str:
    """Why it does not hold and will not; empty if it does, or is about to."""
    if ask.setting == "sleep" and _is_taken(ask, answer):
        return ""  # whatever else was wished for since then
    if ask.setting == "sleep" or (ask.setting == "limit" and answer.asleep):
        now = f"it is {'asleep' if answer.asleep else 'awake'} now"
    else:
        now = f"it is {value_text(ask.setting, _in_force(ask, answer))} now"
    if not answer.is_to_the_wish:
        return f"was overtaken by a later wish; {now}"
    if answer.state == "refused":
        return f"is refused: {printable(answer.reason)}"
    # `applied` is the instance's word for the limit; a guarantee that it does not keep is not.
    return "" if _is_taken(ask, answer) else f"is not taken by the instance; {now}"


def _in_force(ask: Ask, answer: Answer) -> int:
    if ask.setting == "limit":
        return answer.effective_limit_bytes
    return answer.min_bytes if ask.setting == "min" else answer.priority


def _is_taken(ask: Ask, answer: Answer) -> bool:
    """Whether what it keeps to is what was asked; a guarantee may be rounded up."""
    if ask.setting == "sleep":
        return answer.asleep == bool(ask.value)
    if ask.setting == "min":
        return answer.min_bytes >= ask.value
    return ask.setting == "limit" or answer.priority == ask.value
