"""kvcached's segment: a file in /dev/shm through which kvcached's clients read and limit memory.

    own, file = create("chat", engine="vLLM", devices=[("host", 1)])   # `chat.kvelastic`, `chat`
    file.start()        # once the instance handles requests
    file.close()        # before the instance's own segment

The file and the rules of its limits are native code (vmm_csrc/segment/kvcached_segment.h). This
module finds the two names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import SegmentExistsError
from kvelastic.shared import segment
from kvelastic.shared.segment_listing import SHM_DIR, own_name

_MOST_NAMES: Final = 100


def create(
    name: str | None, *, engine: str, model: str = "", devices: Sequence[tuple[str, int]]
) -> tuple[segment.Segment, _vmm.KvcachedSegment]:
    """Create an instance's own segment, named `own_name(name)`, and kvcached's, named `name`.

    Characters that kvcached does not accept in `name` become hyphens, as in kvcached. None means
    `kvcached_<engine>_<process group>`, with a numeric suffix if that name is taken. A file that
    kvcached or a dead instance left behind is reused. Raises the errors of `segment.create`, and
    `SegmentExistsError` if the name belongs to another kind of file or to another user's file.
    """
    if name is not None:
        names = [re.sub(r"[^A-Za-z0-9_-]", "-", name)]
    else:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", engine)[:24]
        first = f"kvcached_{plain}_{os.getpgrp()}"
        names = [first, *(f"{first}_{number}" for number in range(1, _MOST_NAMES))]
    for candidate in names:
        try:
            own = segment.create(own_name(candidate), engine=engine, model=model, devices=devices)
        except SegmentExistsError:
            if candidate == names[-1]:
                raise
            continue
        try:
            return own, beside(own, candidate)
        except BaseException as error:
            own.close()
            if not isinstance(error, SegmentExistsError) or candidate == names[-1]:
                raise
    raise AssertionError("the last candidate returns or raises")


def beside(own: segment.Segment, name: str) -> _vmm.KvcachedSegment:
    """Create the kvcached segment `name` of the instance with the segment `own`."""
    return _vmm.KvcachedSegment.create(str(SHM_DIR / name), str(own.path), own.control_block)
