"""Lets torchvision be imported beside a torch for CPUs: run by a `.pth` file, when Python starts.

The package index's torchvision is a build for GPUs: its compiled operators do not load, and its
Python code declares meta versions of them. So they are named here, without code to run, at the
moment when torchvision is first imported; torch is not imported for it any earlier.
"""

from __future__ import annotations

import sys
from typing import Any

_NON_MAXIMUM_SUPPRESSION = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision:
    library: Any = None
    """Its operators go with it."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any, target: Any = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(cls)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(name + _NON_MAXIMUM_SUPPRESSION)
        cls.library = library


sys.meta_path.insert(0, _BeforeTorchvision)
