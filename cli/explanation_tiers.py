"""What `kvctl explain` says of tiers, on plain values.

lines += explain_tiers(board)      # None: the instance has no tiers, and nothing is said of them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvelastic.cli.explanation_line import Line
from kvelastic.instance.trouble import tier_trouble
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from kvelastic.tier_board_format import BoardFigures, TierFigures


def explain_tiers(board: BoardFigures | None) -> Iterable[Line]:
    """What tiers keep, what became of evicted blocks, and which of them fails."""
    if board is None or not board.tiers:
        return
    blocks = board.blocks
    kept = ", ".join(_kept(tier) for tier in board.tiers)
    evicted = blocks.demoted + blocks.dropped
    what = f"Tiers keep {kept}."
    if evicted:
        what += f" Of {evicted} evicted blocks {blocks.demoted} have a copy there."
    asked = blocks.matched + blocks.unmatched
    if asked:
        what += (
            f" Since its start requests asked for {asked} blocks there: {blocks.matched} were found"
            f" and {blocks.loaded} loaded."
        )
    many_dropped = blocks.dropped > blocks.demoted
    do = "docs/tiers.md says why blocks are dropped without a copy" if many_dropped else ""
    yield Line("tiers", what, do)
    for tier in board.tiers:
        trouble = tier_trouble(tier)
        if trouble is not None:
            yield Line("tiers", trouble.what, trouble.do)
        elif tier.write_left_bytes == 0:
            yield Line(
                "tiers",
                f"{tier.tier} has used up what may be written to it a day; nothing more is stored"
                " there until midnight UTC.",
                "a larger KVELASTIC_TIER_DAILY_WRITE, if the medium may wear faster",
            )


def _kept(tier: TierFigures) -> str:
    limit = "" if tier.limit_bytes is None else f" of {format_size(tier.limit_bytes)}"
    return f"{tier.records} blocks on {tier.tier} ({format_size(tier.used_bytes)}{limit})"
