"""A name that SGLang's connector imports even if layers are not copied one by one.

No process listens at this socket: the setting `enable_layerwise_transfer` is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvelastic.flexkv.common.config import ModelConfig


def build_layerwise_eventfd_socket_path(
    dp_client_id: int, pp_rank: int, model_config: ModelConfig
) -> str:
    """Return the socket path of a client and pipeline stage, by FlexKV's rule."""
    named = os.environ.get("FLEXKV_LAYERWISE_EVENTFD_SOCKET")
    path = Path(named or "/tmp/flexkv_layerwise_eventfd.sock")
    stage = f"_pp{pp_rank}" if model_config.pp_size > 1 else ""
    is_one = model_config.instance_num == model_config.dp_size == 1
    client = "" if is_one else f"_dp{dp_client_id}"
    return str(path.with_name(f"{path.stem}{stage}{client}{path.suffix}"))
