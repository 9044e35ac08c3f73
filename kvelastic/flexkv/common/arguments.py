"""Checks of arguments. Each function returns the value in the form that messages use.

Each raises `InvalidArgumentError`. A value that no message can hold fails only its own call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Any, Final

import numpy as np

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.hash_utils import Tokens, as_tokens
from kvelastic.flexkv.common.request import Mask

MOST_TOKENS: Final = 1 << 20
"""Maximum per request."""
MOST_TASKS: Final = 4096
"""Maximum per call."""
MOST_WAIT_S: Final = 1e9
"""30 years. Longer waits are shortened to this."""
_MOST_ID: Final = 1 << 62


def request_tokens(token_ids: Any, what: str = "token_ids") -> Tokens:
    """Return a 1-D int64 array of at most `MOST_TOKENS`."""
    tokens = as_tokens(token_ids, what)
    if len(tokens) > MOST_TOKENS:
        raise InvalidArgumentError(
            f"{what} has {len(tokens)} values; pass at most {MOST_TOKENS} in one request"
        )
    return tokens


def as_mask(token_mask: Any, length: int) -> Mask | None:
    """Return a bool for each of `length` tokens; None, which means all True, stays None."""
    if token_mask is None:
        return None
    try:
        found = np.asarray(token_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"token_mask cannot be read as an array: {error}") from None
    if found.dtype != np.bool_ or found.shape != (length,):
        raise InvalidArgumentError(
            f"token_mask of shape {found.shape} and dtype {found.dtype} for {length} tokens; pass"
            " one bool for each"
        )
    return found


def is_one(task_ids: object) -> bool:
    """Whether the argument is a single id."""
    return hasattr(task_ids, "__index__") and getattr(task_ids, "ndim", 0) == 0


def task_id_list(task_ids: int | Iterable[int]) -> list[int]:
    """Return ids as plain integers, at most `MOST_TASKS`."""
    try:
        each: Any = [task_ids] if is_one(task_ids) else task_ids
        ids = [index(task_id) for task_id in each]
    except TypeError:
        raise InvalidArgumentError(f"{task_ids!r:.100} is no task id, nor several") from None
    if len(ids) > MOST_TASKS:
        raise InvalidArgumentError(f"{len(ids)} tasks at once; name {MOST_TASKS} at most")
    for task_id in ids:
        if not -_MOST_ID <= task_id <= _MOST_ID:
            raise InvalidArgumentError(f"{task_id} is no task id; pass what a match returned")
    return ids


def launched(task_ids: int | Iterable[int], slot_mappings: Any) -> tuple[list[int], list[Tokens]]:
    """Return task ids and the slots of each; a single id may come with a bare array."""
    ids = task_id_list(task_ids)
    if is_one(task_ids):
        is_wrapped = isinstance(slot_mappings, (list, tuple)) and (
            len(slot_mappings) == 1 and not is_one(slot_mappings[0])
        )
        mappings = list(slot_mappings) if is_wrapped else [slot_mappings]
    else:
        try:
            mappings = list(slot_mappings)
        except TypeError:
            raise InvalidArgumentError(
                f"slot_mappings of type {type(slot_mappings).__name__}; pass a list of rows"
            ) from None
    if len(mappings) != len(ids):
        raise InvalidArgumentError(
            f"{len(ids)} tasks and {len(mappings)} slot mappings; pass one for each"
        )
    if len(set(ids)) != len(ids):
        raise InvalidArgumentError("a task is named twice in one launch; name it once")
    return ids, [request_tokens(one, "slot_mapping") for one in mappings]


def wait_seconds(timeout: Any) -> float:
    """Return seconds, from 0 to `MOST_WAIT_S`."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise InvalidArgumentError(f"timeout={timeout!r:.100} is not accepted; pass seconds")
    return float(min(max(timeout, 0), MOST_WAIT_S))
