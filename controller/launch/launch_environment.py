"""Builds the environment of a launched engine: pure functions.

It is the controller's environment with these changes:

    removed   KVELASTIC_*_KEY, and every variable whose value is a key of the configuration
    added     KVELASTIC_ENGINE_KEY, and VLLM_API_KEY for vLLM: the engine's own key
    added     KVELASTIC_IPC_NAME and ENABLE_KVELASTIC, if the configuration names the model's
              instance
    added     KVELASTIC_LAUNCHED_BY: the controller that launched it (`launch_record`)
    added     `launch.env`, which overrides all others
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from typing import Final

from kvelastic.config import ENGINE_KEY, LAUNCHED_BY
from kvelastic.controller.settings.settings import ModelSettings, Settings

_VLLM_KEY_VARIABLE: Final = "VLLM_API_KEY"
_OUR_KEYS: Final = re.compile(r"KVELASTIC_.*_KEY")


def new_engine_key(model: ModelSettings) -> str:
    """Return the key for one start of an engine: the configured key, else a new random one."""
    launch = model.launch
    assert launch is not None
    if model.api_key:
        return model.api_key
    given = launch.env.get(_VLLM_KEY_VARIABLE) if model.engine == "vllm" else None
    return given or secrets.token_urlsafe(32)


def engine_environment(
    environ: Mapping[str, str], settings: Settings, model: ModelSettings, key: str, mark: str
) -> dict[str, str]:
    """Return the environment of a model's engine. `environ` is the controller's."""
    launch = model.launch
    assert launch is not None
    digests = {each.digest for each in (*settings.auth.api_keys, *settings.auth.admin_keys)}
    for each in settings.models:
        if each.api_key:
            digests.add(hashlib.sha256(each.api_key.encode()).digest())
    texts = {f"sha256:{digest.hex()}" for digest in digests}
    kept = {
        name: value
        for name, value in environ.items()
        if not _OUR_KEYS.fullmatch(name)
        and hashlib.sha256(os.fsencode(value)).digest() not in digests
        and value.lower() not in texts
    }
    kept |= {ENGINE_KEY: key, LAUNCHED_BY: mark}
    if model.instance is not None:
        kept |= {"KVELASTIC_IPC_NAME": model.instance, "ENABLE_KVELASTIC": "true"}
    if model.engine == "vllm":
        kept[_VLLM_KEY_VARIABLE] = key
    return kept | launch.env
