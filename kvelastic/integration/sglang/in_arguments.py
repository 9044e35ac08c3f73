"""Wrapper for the resolution of SGLang's arguments: the first place where all of them are known."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any, Final

from kvelastic.integration.sglang.refusals import ends_process, refuse_arguments

_log = logging.getLogger("kvelastic.sglang")

PAGE_SIZE: Final = 32
"""Tokens of an SGLang page where none is given. Stock takes 1, and has no seam for another pool of
ids there."""


_is_start_checked = False


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
    _check_start()


@ends_process
def _refuse(arguments: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    refuse_arguments(resolving_view(arguments))


@ends_process
def _check_start() -> None:
    """Raise in the server's first process what its scheduler would raise when it has loaded.

    Once: later the name is its own.
    """
    global _is_start_checked
    if _is_start_checked or multiprocessing.parent_process() is not None:
        return
    _is_start_checked = True
    from kvelastic import config, engine_pool, start_checks

    settings = config.load()
    engine_pool.device_for(settings, "SGLang", gpu=None)  # no other one is covered
    start_checks.check_names([settings.ipc_name], ending_s=0.0)
    start_checks.check_guarantee(settings)
