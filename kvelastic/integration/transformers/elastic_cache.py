"""`ElasticCache`: a KV cache for `model.generate` in the elastic memory of an instance.

    with ElasticCache.for_model(model) as cache:
        model.generate(**inputs, past_key_values=cache)

Keys and values are in a range of addresses. Pages are mapped into it as the sequence grows
(`token_rows` has a drawing). So existing tokens are never copied, while `DynamicCache` copies all
tokens for every new one. `kvctl list` shows the cache, and `kvctl limit` limits it.

This module imports torch and transformers. `kvelastic.integration.transformers` imports this module
only when `ElasticCache` is accessed.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import Any, Final

import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from kvelastic import engines
from kvelastic.config import Config, load
from kvelastic.device.selection import resolve
from kvelastic.errors import InvalidArgumentError, UnsupportedEngineError, UnsupportedError
from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.transformers.growing_pages import open_growing_pages
from kvelastic.integration.transformers.token_store import TokenStore
from kvelastic.logs import log_once
from kvelastic.units import parse_size

__all__ = ["ElasticCache"]

_FULL: Final = "full_attention"
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


class ElasticLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the cache. All layers share one `TokenStore`."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    # No super().__init__(): it sets attributes that are properties here.
    def __init__(self, store: TokenStore, index: int, window: int | None) -> None:
        self._store = store
        self._index = index
        self._window = window
        self.is_sliding = window is not None

    @property
    def is_initialized(self) -> bool:
        """True if the layer has tokens."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """A view `[batch, heads, tokens, dim]` of the keys, or None without tokens.

        Valid until the cache is cropped or reset.
        """
        return self._store.view(self._index, 0) if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """A view of the values, or None. Shape and validity are those of `keys`."""
        return self._store.view(self._index, 1) if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: `update` maps memory for the first tokens."""

    # torch.compile cannot trace the mapping of memory, so this function runs uncompiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch is untyped here
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, and return the keys and values that attention may read.

        A sliding layer returns only its window. Raises the errors of `TokenStore.append`.
        """
        before = self.get_seq_length()
        keys, values = self._store.append(self._index, key_states, value_states)
        if before == 0:
            return key_states, value_states  # the arguments hold the same tokens, contiguous
        if self._window is None or before < self._window:
            return keys, values
        # The number must equal the result of get_mask_sizes().
        first = before - self._window + 1
        return keys[:, :, first:], values[:, :, first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the next `update` returns, and the first one's position.

        `query_length` is the number of tokens that `update` will append.
        """
        tokens = self.get_seq_length()
        first = 0 if self._window is None else max(0, tokens - self._window + 1)
        return tokens - first + query_length, first

    def get_seq_length(self) -> int:
        """Return the number of tokens in this layer."""
        return self._store.lengths[self._index]

    def get_max_length(self) -> int:
        """Return the window of a sliding layer, or -1 for a layer bounded only by memory."""
        return -1 if self._window is None else self._window

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch in place for beam search: row i becomes row `beam_idx[i]`."""
        self._store.reorder(self._index, beam_idx)

    def reset(self) -> None:
        """Raise `UnsupportedError`. Layers share pages, so only the whole cache can be reset."""
        raise UnsupportedError("a layer of an ElasticCache is reset with the cache: cache.reset()")

    def offload(self) -> None:
        """Raise `UnsupportedError`. The memory belongs to one device."""
        raise UnsupportedError(
            "an ElasticCache is not offloaded layer by layer; make it with device='cpu', or limit"
            " it with `kvctl limit`"
        )

    prefetch = offload


class ElasticCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A KV cache for `generate(past_key_values=...)`. Each cache is a separate instance.

        cache = ElasticCache.for_model(model, limit="2G")
        model.generate(**first_turn, past_key_values=cache)
        model.generate(**both_turns, past_key_values=cache)      # continues
        cache.reset()                                            # releases memory; use it again
        cache.close()                                            # or a with statement, or del

    `config` is the model's configuration. `device` is the model's device: `cpu`, `cuda:1` or a
    torch device. The default is `KVELASTIC_DEVICE`. `limit`, in bytes or a size such as `"2G"`,
    overrides `KVELASTIC_LIMIT`. `name` overrides `KVELASTIC_IPC_NAME`. If a process has several
    caches, the second is called NAME_2. The other variables apply as for an engine, except
    `ENABLE_KVELASTIC`, which has no effect.

    The cache has no maximum length. Its limit, the device's ledger and the device bound it. A step
    that needs more raises `LimitReachedError` or `OutOfMemoryError` and leaves the cache unchanged.
    A lower limit does not remove tokens in use: `kvctl` shows `shrinking` until the program removes
    tokens.

    These work as with `DynamicCache`: beams, several sequences, padding, assisted and prompt lookup
    decoding, `crop`, `copy.deepcopy`, and layers with a sliding window, which keep all their
    tokens. These raise `UnsupportedError`: hybrid models, encoder-decoder models, models on several
    devices, layers of different shapes, training and offloading. In a model compiled with
    `torch.compile`, the cache's own code runs uncompiled.

    The constructor raises `UnsupportedEngineError` for an untested series of transformers. With
    `KVELASTIC_STRICT=false` it logs a warning instead. It also raises the errors of
    `kvelastic.pool.pool.open_pool`.

    One thread at a time may use a cache; threads may use different caches concurrently. Using it in
    a forked child raises `DeviceUnavailableError`. Tensors from `layers[i].keys` must not be used
    after `crop` or `reset`. They stay valid after `close`, and keep their memory until they are
    deleted.
    """

    def __init__(
        self,
        config: Any,
        *,
        device: Any = None,
        limit: int | str | None = None,
        name: str | None = None,
    ) -> None:
        settings = _settings_with(limit)
        _check_version(settings)
        self._made_with: dict[str, Any] = {"config": config, "device": device, "limit": limit}
        windows = _windows_of(config)
        where = resolve(_device_name(device, settings), settings)
        pages = open_growing_pages(
            settings,
            where,
            engine="transformers",
            lanes=1 if settings.contiguous_layout else 2 * len(windows),
            model=str(getattr(config, "_name_or_path", "") or ""),
            name=name,
        )
        self._pages = pages
        try:
            self._store = TokenStore(pages, where, len(windows))
        except BaseException:
            pages.close(is_unused=True)
            raise
        # For a cache that is deleted without `close`: an open pool is never garbage-collected.
        self._end = weakref.finalize(self, TokenStore.close, self._store)
        super().__init__(
            layers=[ElasticLayer(self._store, i, window) for i, window in enumerate(windows)]
        )

    @classmethod
    def for_model(
        cls, model: Any, *, limit: int | str | None = None, name: str | None = None
    ) -> ElasticCache:
        """Return a cache for `model` on the model's device.

        Raises `UnsupportedError` if the model is on several devices, and the constructor's errors.
        """
        devices = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(devices) > 1:
            raise UnsupportedError(
                f"the model lies on several devices ({', '.join(sorted(devices))}), and a cache on"
                " one; load it on one device, or use DynamicCache"
            )
        return cls(model.config, device=model.device, limit=limit, name=name)

    @property
    def name(self) -> str:
        """The name of the cache's instance in `kvctl`."""
        return self._pages.pool.name

    def reset(self) -> None:
        """Remove all tokens and release all pages but one. Blocks until they are unmapped.

        Afterwards, the cache accepts a batch of another size.
        """
        self._store.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of the sequence.

        A negative `tokens_to_remove` is the number to remove. A positive one is the number to keep,
        and zero has no effect. Unused pages are parked (see `GrowingPages.shrink`).
        """
        lengths = self._store.lengths
        if tokens_to_remove > 0:
            self._store.cut([tokens_to_remove] * len(lengths))
        elif tokens_to_remove < 0:
            self._store.cut([max(0, length + tokens_to_remove) for length in lengths])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times.

        On failure, raises the same errors as a step and leaves the cache unchanged.
        """
        self._store.select_rows(torch.arange(self._store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given sequences of the batch, in that order.

        `indices` has indices, or is a boolean mask.
        """
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._store.select_rows(indices)

    def close(self) -> None:
        """Release the memory, leave the ledger and remove the segment. Idempotent.

        Blocks while the driver unmaps pages. Any later use raises. Tensors from `layers[i].keys`
        keep their memory until they are deleted.
        """
        self._end()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the cache's state is inconsistent."""
        self._store.check_integrity()

    def __enter__(self) -> ElasticCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _: dict[int, Any]) -> ElasticCache:
        """Return a copy with the same tokens, e.g. to reuse a prompt. It is a separate instance."""
        other = ElasticCache(**self._made_with)
        try:
            self._store.copy_to(other._store)
        except BaseException:
            other.close()
            raise
        return other

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "an ElasticCache cannot be pickled: its memory belongs to this process"
        )


def _settings_with(limit: int | str | None) -> Config:
    settings = load()
    if limit is None:
        return settings
    limit_bytes = parse_size(limit) if isinstance(limit, str) else limit
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
        raise InvalidArgumentError(
            f"limit={limit!r} is not accepted; give bytes, or a size such as '2G'"
        )
    return dataclasses.replace(settings, limit=limit_bytes)


def _check_version(settings: Config) -> None:
    version = str(transformers.__version__)
    engine = engines.find("transformers")
    if engines.serves(engine.tried, version):
        return
    tried = engines.tried(engine.tried)
    text = f"ElasticCache was tried with transformers {tried}, and this is {version}"
    if engines.served_as(engine.tried, version, strict=settings.strict) is None:
        way_out = engines.way_out(engine.tried, version)
        raise UnsupportedEngineError(f"{text}; use DynamicCache, or {way_out} to try it anyway")
    probe = Probe(f"transformers {version}", page="docs/transformers.md")
    missing = sorted(getattr(ElasticLayer, "__abstractmethods__", ()))
    probe.holds("the methods of a cache's layer", not missing, "no further ones", missing)
    probe.check("transformers.cache_utils:get_layer_types_and_kwargs(config)")
    probe.refuse_if_broken()
    log_once(logging.WARNING, f"{text}; going on. KVELASTIC_STRICT=true refuses untested versions.")


def _device_name(device: Any, settings: Config) -> str:
    if device is None:
        return settings.device
    if str(device) == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def _windows_of(config: Any) -> list[int | None]:
    """Return the window of each layer that has a cache; None if it attends to all tokens."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("ElasticCache serves no encoder-decoder models; use DynamicCache")
    types, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if isinstance(settings, dict):  # before 5.18: one dict for all layers
        settings = [settings] * len(types)
    for index, kind in enumerate(types):
        if kind != _FULL and kind not in _WINDOWED:
            raise UnsupportedError(
                f"layer {index} of the model is of the kind {kind}; ElasticCache serves"
                f" {', '.join((_FULL, *_WINDOWED))} only. Use DynamicCache"
            )
    return [
        int(layer["sliding_window"]) if kind in _WINDOWED else None
        for kind, layer in zip(types, settings, strict=False)
    ]
