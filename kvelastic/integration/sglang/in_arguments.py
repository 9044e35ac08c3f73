"""Wraps the resolution of SGLang's arguments, the first point at which their values are known."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any, Final

from kvelastic.integration.sglang.refusals import ends_process, refuse_arguments

_log = logging.getLogger("kvelastic.sglang")

PAGE_SIZE: Final = 32
"""Default tokens of an SGLang page. Stock SGLang uses 1, whose allocator cannot be replaced."""


_is_start_checked = False


def resolve_once(original: Callable[..., None], arguments: Any) -> None:
    """Set a page size if none was given, and refuse unsupported arguments.

    Every process of SGLang resolves the arguments or receives resolved ones, and refuses.
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
    """Raise in the server's first process what its scheduler would raise after loading.

    Runs once: later the server itself has the name.
    """
    global _is_start_checked
    if _is_start_checked or multiprocessing.parent_process() is not None:
        return
    _is_start_checked = True
    from kvelastic import config
    from kvelastic.integration import start_checks
    from kvelastic.pool import engine_pool

    settings = config.load()
    engine_pool.device_for(settings, "SGLang", gpu=None)  # only the CPU is supported
    start_checks.check_names([settings.ipc_name], ending_s=0.0)
    start_checks.check_guarantee(settings)
