"""Warnings about valid but probably unintended configurations: pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic.address import is_loopback
from kvelastic.controller.settings.settings import AuthSettings, ModelSettings, Settings

_LONGEST_PREFILL_S: Final = 120.0


def warnings_of(settings: Settings) -> list[str]:
    """Return one sentence per warning, with the remedy."""
    found = list(_of_keys(settings.auth))
    known = {model.name: model for model in settings.models}
    for model in settings.models:
        found += _of_launch(model)
        if model.prefill is not None:
            found += _of_prefill(model, known[model.prefill])
    return found


def _of_keys(auth: AuthSettings) -> Iterator[str]:
    for name, keys in (("api_keys", auth.api_keys), ("admin_keys", auth.admin_keys)):
        count = sum(key.is_in_file for key in keys)
        if count:
            yield (
                f"auth.{name}: every reader of the configuration file has {count} of the"
                f" {len(keys)} keys; write sha256:HEX of a key (printf %s KEY | sha256sum), or"
                " ${ENV_NAME}"
            )


def _of_launch(model: ModelSettings) -> Iterator[str]:
    if model.launch is None:
        return
    command = model.launch.command
    host = _value_of("--host", command)
    if host is not None and not is_loopback(host):
        yield (
            f"model {model.name!r}: its engine listens on {host}, where others can reach it past"
            " the controller; write --host 127.0.0.1"
        )
    is_hidden = any("--host" in word or "--uds" in word for word in command)  # sh -c '...'
    if host is None and not is_hidden and model.engine == "vllm":
        yield (
            f"model {model.name!r}: without --host vLLM listens on all interfaces, where others can"
            " reach it past the controller; write --host 127.0.0.1"
        )
    if _value_of("--api-key", command) is not None:
        yield (
            f"model {model.name!r}: every user of this machine can read the --api-key of its"
            " command (ps); vLLM gets its key in its environment, so leave it out"
        )


def _of_prefill(model: ModelSettings, pool: ModelSettings) -> Iterator[str]:
    idle_s = pool.timeouts.idle
    if not 0 < idle_s <= _LONGEST_PREFILL_S:
        how_long = f"up to {idle_s:g} s" if idle_s else "for ever"
        yield (
            f"model {model.name!r}: a request waits {how_long} for a prefill engine that hangs; set"
            f" timeouts.idle of model {pool.name!r} to the longest time that a prompt may take"
        )


def _value_of(option: str, command: tuple[str, ...]) -> str | None:
    for word, after in zip(command, (*command[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return None
