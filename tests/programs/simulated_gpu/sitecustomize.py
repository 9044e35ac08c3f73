"""First in PYTHONPATH: vLLM's CPU kernels compute on the simulated driver's memory.

A process that vLLM starts imports this by itself, and with `KVSIM_MACHINE` replaces two seams: how
the device is chosen, and how a range becomes a tensor. So the whole CUDA path serves real tokens,
but for torch's streams and graphs.
"""

from __future__ import annotations

import os

if os.environ.get("KVSIM_MACHINE"):
    import seams  # type: ignore[import-not-found]  # this folder is first in PYTHONPATH then

    from kvelastic.integration.vllm import worker_device
    from kvelastic.pool import tensors

    worker_device.open_driver = seams.open_driver
    worker_device.compute_streams = seams.compute_streams
    worker_device.model_name = lambda worker: "simulated GPU"
    tensors.whole_range = seams.whole_range
