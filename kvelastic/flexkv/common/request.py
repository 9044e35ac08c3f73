"""FlexKV's requests and responses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class KVRequestType(Enum):
    """The kind of a request."""

    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"
    SHUTDOWN = "shutdown"


@dataclass
class KVRequest:
    """A request, under FlexKV's name. `common.calls` has the messages."""

    request_type: KVRequestType
    request_id: int
    token_ids: npt.NDArray[np.int64]
    token_mask: Mask | None = None
    slot_mapping: npt.NDArray[np.int64] | None = None
    layer_granularity: int = -1
    dp_id: int = 0
    namespace: Sequence[str] | None = None


class KVResponseStatus(Enum):
    """The result of a task. UNREADY: it was not launched yet."""

    SUCCESS = "success"
    NOTFOUND = "not_found"
    UNREADY = "unready"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class KVResponse:
    """The response of one task.

    `return_mask` is True for the tokens that were moved. For a failed get, these are the leading
    tokens that are in the engine's blocks. None for an unknown task.
    """

    status: KVResponseStatus
    task_id: int
    return_mask: Mask | None = None
    return_masks: tuple[Mask | None, ...] = ()
    """Masks of the tasks in a batch, in order."""

    def get_mask(self, idx: int = 0) -> Any:
        """Return the mask of one task of a batch, or the task's own mask; None without a mask.

        The mask is a torch tensor if torch is loaded.
        """
        if self.return_masks:
            mask = self.return_masks[idx] if 0 <= idx < len(self.return_masks) else None
        else:
            mask = self.return_mask if idx == 0 else None
        torch = sys.modules.get("torch")
        return mask if torch is None or mask is None else torch.from_numpy(mask)
