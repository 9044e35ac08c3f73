"""What is asked of a KVManager, and what it answers."""

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
    """What a request is for."""

    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"
    SHUTDOWN = "shutdown"


@dataclass
class KVRequest:
    """One request, as it is recorded and passed on."""

    request_type: KVRequestType
    request_id: int
    token_ids: npt.NDArray[np.int64]
    token_mask: Mask | None = None
    slot_mapping: npt.NDArray[np.int64] | None = None
    layer_granularity: int = -1
    dp_id: int = 0
    namespace: Sequence[str] | None = None


class KVResponseStatus(Enum):
    """What became of a task. UNREADY: it was waited for before its launch."""

    SUCCESS = "success"
    NOTFOUND = "not_found"
    UNREADY = "unready"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class KVResponse:
    """The answer to one task.

    `return_mask` is True for the tokens that were moved; of a get that failed these are the leading
    ones that lie in their blocks, and what follows is to be computed. None where no task is known.
    """

    status: KVResponseStatus
    task_id: int
    return_mask: Mask | None = None
    return_masks: tuple[Mask | None, ...] = ()
    """Of tasks that were launched as one batch, in their order."""

    def get_mask(self, idx: int = 0) -> Any:
        """The mask of one task of a batch, else its own: a torch tensor where torch is loaded.

        None where there is none.
        """
        if self.return_masks:
            mask = self.return_masks[idx] if 0 <= idx < len(self.return_masks) else None
        else:
            mask = self.return_mask if idx == 0 else None
        torch = sys.modules.get("torch")
        return mask if torch is None or mask is None else torch.from_numpy(mask)
