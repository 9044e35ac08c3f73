"""Where FlexKV's layerwise worker listens: SGLang's connector asks, also if it is switched off.

Nothing listens there. Blocks are moved in all layers at once, and the setting
`enable_layerwise_transfer` is refused when the configuration is read.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvelastic.flexkv.common.config import ModelConfig

_DEFAULT = "/tmp/flexkv_layerwise_eventfd.sock"


def build_layerwise_eventfd_socket_path(
    dp_client_id: int, pp_rank: int, model_config: ModelConfig
) -> str:
    """The path of the socket of one client and pipeline stage, by FlexKV's rule."""
    path = Path(os.environ.get("FLEXKV_LAYERWISE_EVENTFD_SOCKET") or _DEFAULT)
    stage = f"_pp{pp_rank}" if model_config.pp_size > 1 else ""
    is_one = model_config.instance_num == model_config.dp_size == 1
    client = "" if is_one else f"_dp{dp_client_id}"
    return str(path.with_name(f"{path.stem}{stage}{client}{path.suffix}"))
