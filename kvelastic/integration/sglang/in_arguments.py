"""Wrapper for the resolution of SGLang's arguments: the first place where all of them are known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kvelastic.integration.sglang.refusals import ends_process, refuse_arguments

_log = logging.getLogger("kvelastic.sglang")

PAGE_SIZE: Final = 32
"""Tokens of an SGLang page where none is given. Stock takes 1, and has no seam for another pool of
ids there."""


def resolve_once(original: Callable[..., None], arguments: Any) -> None:
    """A page size where none is given, and refuse what is not covered.

    Each process of SGLang resolves the arguments, or has got them resolved; each of them refuses.
    """
    if arguments.page_size is None and not getattr(arguments, "_resolution_finished", False):
        arguments.page_size = PAGE_SIZE
        _log.info(
            "No --page-size was given: kvelastic takes %d (SGLang's own is 1). Prefixes are"
            " cached in whole pages.",
            PAGE_SIZE,
        )
    original(arguments)
    _refuse(arguments)


@ends_process
def _refuse(arguments: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    refuse_arguments(resolving_view(arguments))
