"""`ElasticCache` in `generate`: the tokens of DynamicCache, in memory that an operator limits."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from open_memfds import open_memfds
from simulated_machine import SimulatedMachine
from waiting import wait_until

from kvelastic import errors
from kvelastic.instance.status import status_of
from kvelastic.shared import ledger, segment
from kvelastic.units import MIB_BYTES

pytestmark = [pytest.mark.slow, needs.transformers, pytest.mark.filterwarnings("ignore")]

PROGRAMS = Path(__file__).parents[1] / "programs"
PAGE_BYTES = 2 * MIB_BYTES
LEDGER = f"test-{os.getpid()}-elastic-cache"
SETTINGS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,  # so that wrong keys and values show in the tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 4,  # no experts
}
"""Of DeepSeek-V3: K of 48 and V of 32 floats a head, as transformers keeps no latents."""
A_PAGE = PAGE_BYTES // (4 * 2 * 2 * 32 * 4)
"""Tokens of one sequence that a page holds: four layers, K and V, two heads, 32 floats."""
UNUSED = A_PAGE // 64
"""So many fewer in the first one, which has the null block."""


@pytest.fixture(scope="module")
def kit() -> Iterator[SimpleNamespace]:
    """torch, transformers, ElasticCache and tiny models: importing them takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        from kvelastic.integration.transformers import ElasticCache

        def model(kind: str, **further: Any) -> Any:
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(**{**SETTINGS, **further})
            return getattr(transformers, f"{kind}ForCausalLM")(config).eval()

        half = ["full_attention", "sliding_attention"] * 2
        models = {
            "full": model("Llama"),
            "sliding": model("Mistral", sliding_window=16),
            "both": model("Qwen2", use_sliding_window=True, sliding_window=16, layer_types=half),
            "latents": model("DeepseekV3", **LATENTS),
        }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they would only wait for one another, the models are so small
    yield SimpleNamespace(
        torch=torch, transformers=transformers, ElasticCache=ElasticCache, models=models
    )
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVELASTIC_LEDGER", LEDGER)
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "256M")
    before = open_memfds().keys()
    yield
    gc.collect()
    assert open_memfds().keys() <= before, "memory is left behind"


def prompt(kit: SimpleNamespace, rows: int, tokens: int, seed: int = 1) -> Any:
    generator = kit.torch.Generator().manual_seed(seed)
    return kit.torch.randint(3, 512, (rows, tokens), generator=generator)


def generate(model: Any, ids: Any, cache: Any, tokens: int = 16, **further: Any) -> Any:
    further.setdefault("attention_mask", ids.new_ones(ids.shape))
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, **further
    )


def dynamic(kit: SimpleNamespace, model: Any) -> Any:
    return kit.transformers.DynamicCache(config=model.config)


def mapped_bytes(cache: Any) -> int:
    return segment.inspect(cache.name).usage["mapped_bytes"]


def granted_bytes() -> int:
    ledgers = [one for one in ledger.list_ledgers() if one.group == LEDGER]
    return sum(member.granted_bytes for one in ledgers for member in one.members)


def on_disk_bytes() -> int:
    """Of all memory files of this process, as the kernel counts them."""
    return sum(path.stat().st_blocks * 512 for path in open_memfds().values())


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_contiguous"),
    [
        ("full", "true"),
        ("sliding", "true"),
        ("both", "true"),
        ("both", "false"),
        ("latents", "true"),
        ("latents", "false"),
    ],
)
def test_two_chat_turns_match_dynamic_cache(
    kit: SimpleNamespace, kind: str, is_contiguous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_CONTIGUOUS_LAYOUT", is_contiguous)
    model = kit.models[kind]
    stock = dynamic(kit, model)
    with kit.ElasticCache.for_model(model) as cache:
        ids = prompt(kit, 2, 40)
        for turn in (2, 3):
            expected, got = generate(model, ids, stock), generate(model, ids, cache)
            assert kit.torch.equal(got, expected)
            ids = kit.torch.cat([expected, prompt(kit, 2, 9, seed=turn)], 1)
        assert cache.get_seq_length() == stock.get_seq_length()
        cache.check_integrity()


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"assistant": True},
        {"padded": True},
    ],
    ids=lambda how: next(iter(how)),
)
def test_generation_modes_match_dynamic_cache(kit: SimpleNamespace, how: dict[str, Any]) -> None:
    model, how = kit.models["both"], dict(how)
    is_padded = how.pop("padded", False)
    ids = prompt(kit, 2 if is_padded else 1, 40)
    mask = kit.torch.ones_like(ids)
    if is_padded:
        ids[1, :17] = mask[1, :17] = 0
    if how.pop("assistant", False):
        how["assistant_model"] = kit.models["full"]
    if "prompt_lookup_num_tokens" in how:
        ids = ids[:, :10].repeat(1, 4)
    expected = generate(model, ids, dynamic(kit, model), attention_mask=mask, **how)
    with kit.ElasticCache.for_model(model) as cache:
        assert kit.torch.equal(generate(model, ids, cache, attention_mask=mask, **how), expected)
        cache.check_integrity()


def test_zeroed_memory_changes_the_tokens(kit: SimpleNamespace) -> None:
    """Else the other tests would prove nothing: attention reads what lies in the pages."""
    model = kit.models["full"]
    ids = prompt(kit, 1, 40)
    expected = generate(model, ids, dynamic(kit, model))
    with kit.ElasticCache.for_model(model) as cache:
        generate(model, ids, cache, tokens=1)
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        again = generate(model, expected[:, :41], cache, tokens=15)
        assert not kit.torch.equal(again, expected)


def test_random_calls_match_dynamic_cache(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows get longer and shorter, over several pages and in several pieces."""
    from kvelastic.integration.transformers import token_store

    torch = kit.torch
    monkeypatch.setattr(token_store, "_MOVED_AT_ONCE_BYTES", 1_000_000)
    generator = torch.Generator().manual_seed(3)

    def roll(sides: int) -> int:
        return int(torch.randint(sides, (1,), generator=generator))

    model = kit.models["full"]
    layers, heads, dim = model.config.num_hidden_layers, 32, 64
    for is_contiguous, pages in (("true", 6), ("false", 2)):
        monkeypatch.setenv("KVELASTIC_CONTIGUOUS_LAYOUT", is_contiguous)
        stock, most_pages = dynamic(kit, model), 0
        with kit.ElasticCache.for_model(model) as cache:
            batch = 1
            for _ in range(40):
                step = roll(6) if stock.get_seq_length() else 0
                if step in (0, 1):
                    shape = (batch, heads, roll(50) + 1, dim)
                    for layer in range(layers):
                        states = [torch.randn(shape, generator=generator) for _ in range(2)]
                        for mine, its in zip(
                            cache.update(*states, layer), stock.update(*states, layer), strict=True
                        ):
                            assert torch.equal(mine, its)
                else:
                    if step == 2:
                        call, argument = "crop", -roll(70)
                    elif step == 3:
                        call, argument = "reorder_cache", torch.randperm(batch)
                    elif step == 4 and batch <= 4:
                        call, argument = "batch_repeat_interleave", 2
                    else:
                        call = "batch_select_indices"
                        argument = torch.randint(batch, (roll(3) + 1,), generator=generator)
                    for one in (cache, stock):
                        getattr(one, call)(argument)
                    batch = stock.layers[0].keys.shape[0]
                cache.check_integrity()
                most_pages = max(most_pages, segment.inspect(cache.name).usage["pages_mapped"])
                if stock.get_seq_length() == 0:
                    batch = roll(3) + 1
                    stock = dynamic(kit, model)
                    continue
                for mine, its in zip(cache.layers, stock.layers, strict=True):
                    assert torch.equal(mine.keys, its.keys)
                    assert torch.equal(mine.values, its.values)
        assert most_pages >= pages


def test_copied_prompt_can_be_continued(kit: SimpleNamespace) -> None:
    model = kit.models["full"]
    ids = prompt(kit, 1, 40)
    with kit.ElasticCache.for_model(model) as start:
        with kit.torch.no_grad():
            model(ids, past_key_values=start)
        for seed in (2, 3):
            whole = kit.torch.cat([ids, prompt(kit, 1, 5, seed)], 1)
            with copy.deepcopy(start) as cache:
                assert cache.name != start.name
                got = generate(model, whole, cache)
            assert kit.torch.equal(got, generate(model, whole, dynamic(kit, model)))
        assert start.get_seq_length() == 40


# --- memory ---------------------------------------------------------------------------------------


def feed(kit: SimpleNamespace, cache: Any, tokens: int, layers: int = 4) -> None:
    states = kit.torch.ones(1, 2, tokens, 32)
    for layer in range(layers):
        cache.update(states, states, layer)


def state_at(cache: Any, **request: Any) -> str:
    """What kvctl shows once the cache has answered that request."""
    segment.request(cache.name, **request, wait_s=0)
    wait_until(lambda: status_of(segment.inspect(cache.name)).state != "pending")
    return status_of(segment.inspect(cache.name)).state


def test_memory_follows_the_token_count(kit: SimpleNamespace) -> None:
    before_bytes = on_disk_bytes()
    cache = kit.ElasticCache.for_model(kit.models["full"])
    assert mapped_bytes(cache) == granted_bytes() == 0
    for pages in (1, 2, 3, 4):
        feed(kit, cache, A_PAGE - (UNUSED if pages == 1 else 0))
        assert mapped_bytes(cache) == granted_bytes() == pages * PAGE_BYTES
        assert on_disk_bytes() - before_bytes == pages * PAGE_BYTES
    name = cache.name
    assert segment.inspect(name).header["engine"] == "transformers"
    cache.crop(-2 * A_PAGE)
    usage = segment.inspect(name).usage
    assert (usage["pages_parked"], usage["mapped_bytes"]) == (2, 4 * PAGE_BYTES)
    cache.reset()
    assert mapped_bytes(cache) == granted_bytes() == PAGE_BYTES
    assert (cache.get_seq_length(), cache.layers[0].keys) == (0, None)
    cache.close()
    cache.close()
    assert granted_bytes() == on_disk_bytes() - before_bytes == 0
    with pytest.raises(errors.SegmentNotFoundError):
        segment.inspect(name)
    with pytest.raises(errors.PoolFailedError, match="closed"):
        feed(kit, cache, 1)


def test_dropped_cache_releases_its_memory(kit: SimpleNamespace) -> None:
    cache = kit.ElasticCache.for_model(kit.models["full"])
    feed(kit, cache, 10)
    keys, name = cache.layers[3].keys, cache.name
    del cache  # no cycle: nobody has to collect it
    with pytest.raises(errors.SegmentNotFoundError):
        segment.inspect(name)
    assert keys.sum() == 10 * 2 * 32, "a tensor keeps its memory"
    assert granted_bytes() == PAGE_BYTES
    del keys
    assert granted_bytes() == 0
    ledger.reap()


def test_cropped_pages_are_released_when_idle(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_IDLE_TRIM_SECONDS", "0")
    with kit.ElasticCache.for_model(kit.models["full"]) as cache:
        feed(kit, cache, 4 * A_PAGE - UNUSED)
        cache.crop(10)
        wait_until(lambda: mapped_bytes(cache) == granted_bytes() == PAGE_BYTES)
        assert cache.get_seq_length() == 10


def test_reached_limit_raises_and_higher_limit_continues(kit: SimpleNamespace) -> None:
    model = kit.models["full"]
    ids = prompt(kit, 8, 258)
    stock = dynamic(kit, model)
    expected = generate(model, ids, stock, tokens=12)
    with kit.ElasticCache.for_model(model, limit="5M") as cache:  # two pages and a half
        with kit.torch.no_grad():
            model(ids[:, :250], past_key_values=cache)
        held = [layer.keys.clone() for layer in cache.layers]
        for _ in range(2):
            with pytest.raises(errors.LimitReachedError) as refused:
                generate(model, ids, cache, tokens=12)
            assert refused.value.code == "LIMIT_REACHED"
            assert isinstance(refused.value, MemoryError)
            said = str(refused.value)
            for part in (cache.name, "6.00 MiB", "4.00 MiB", "5.00 MiB", "kvctl limit"):
                assert part in said
            assert cache.get_seq_length() == 250
            for layer, keys in zip(cache.layers, held, strict=True):
                assert kit.torch.equal(layer.keys, keys)
            cache.check_integrity()
        assert state_at(cache, limit_bytes=20 * MIB_BYTES) == "applied"
        assert kit.torch.equal(generate(model, ids, cache, tokens=12), expected)


def test_lower_limit_releases_unused_pages_only(kit: SimpleNamespace) -> None:
    with kit.ElasticCache.for_model(kit.models["full"]) as cache:
        feed(kit, cache, 6 * A_PAGE - UNUSED)
        cache.crop(3 * A_PAGE - UNUSED)
        assert state_at(cache, limit_bytes=5 * PAGE_BYTES) == "applied"
        assert mapped_bytes(cache) == 5 * PAGE_BYTES
        # One parked page has gone: not the last one, so the pool has others at hand.
        assert state_at(cache, limit_bytes=6 * PAGE_BYTES) == "applied"
        feed(kit, cache, 1)
        assert (cache.layers[0].keys[:, :, -1] == 1).all()
        cache.check_integrity()
        assert state_at(cache, limit_bytes=2 * PAGE_BYTES) == "shrinking"
        assert mapped_bytes(cache) == 4 * PAGE_BYTES
        assert cache.get_seq_length() == 3 * A_PAGE - UNUSED + 1
        with pytest.raises(errors.LimitReachedError):
            feed(kit, cache, A_PAGE)
        cache.crop(10)
        wait_until(lambda: segment.inspect(cache.name).ack["state"] == "applied")
        assert mapped_bytes(cache) <= 2 * PAGE_BYTES


def test_sleeping_cache_gets_no_more_memory(kit: SimpleNamespace) -> None:
    with kit.ElasticCache.for_model(kit.models["full"]) as cache:
        feed(kit, cache, 10)
        assert state_at(cache, asleep=True) == "shrinking"
        with pytest.raises(errors.LimitReachedError, match="kvctl wake"):
            feed(kit, cache, A_PAGE)
        assert (cache.layers[0].keys == 1).all()
        assert state_at(cache, asleep=False) == "applied"
        feed(kit, cache, A_PAGE)


def test_two_caches_share_the_device(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "8M")
    monkeypatch.setenv("KVELASTIC_IPC_NAME", f"cache-{os.getpid()}")
    monkeypatch.setenv("KVELASTIC_LEDGER", f"{LEDGER}-two")
    model = kit.models["full"]
    with kit.ElasticCache.for_model(model) as one, kit.ElasticCache.for_model(model) as other:
        assert (one.name, other.name) == (f"cache-{os.getpid()}", f"cache-{os.getpid()}_2")
        feed(kit, one, 4 * A_PAGE - UNUSED)
        one.crop(10)  # three pages are parked; its owner is not idle yet, so the other one waits
        feed(kit, other, 3 * A_PAGE - UNUSED)
        assert [mapped_bytes(cache) // PAGE_BYTES for cache in (one, other)] == [1, 3]


# --- what is refused ------------------------------------------------------------------------------


def test_unsupported_models_and_calls_are_rejected(kit: SimpleNamespace) -> None:
    torch, cache_of = kit.torch, kit.ElasticCache
    hybrid = copy.deepcopy(kit.models["both"].config)
    hybrid.layer_types = ["conv", "full_attention", "conv", "full_attention"]
    for config, said in (
        (kit.transformers.T5Config(), "encoder-decoder"),
        (hybrid, "of the kind conv"),
        (kit.transformers.DeepseekV4Config(), "of the kind heavily_compressed_attention"),
    ):
        with pytest.raises(errors.UnsupportedError, match=said):
            cache_of(config, device="cpu")
    split = SimpleNamespace(config=None, device="cpu", hf_device_map={"a": 0, "b": 1})
    with pytest.raises(errors.UnsupportedError, match="several devices"):
        cache_of.for_model(split)
    for limit in (-1, True, 2.5):
        with pytest.raises(errors.InvalidArgumentError, match="limit="):
            cache_of(kit.models["full"].config, device="cpu", limit=limit)
    with cache_of.for_model(kit.models["full"]) as cache:
        states = torch.ones(1, 2, 3, 32)
        cases = {
            "training": lambda: cache.update(states.clone().requires_grad_(), states, 0),
            "alike": lambda: cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 32), 1),
            "torch.float16": lambda: cache.update(states.half(), states.half(), 1),
            "pickled": lambda: pickle.dumps(cache),
            "reset": cache.layers[0].reset,
            "offloaded": cache.layers[0].offload,
        }
        cache.update(states, states, 0)
        for said, call in cases.items():
            with pytest.raises(errors.UnsupportedError, match=said):
                call()
        with pytest.raises(errors.InvalidArgumentError, match="on meta"):
            cache.update(states.to("meta"), states.to("meta"), 1)
        with pytest.raises(errors.InvalidArgumentError, match="of 1 sequences"):
            cache.update(states.repeat(2, 1, 1, 1), states.repeat(2, 1, 1, 1), 1)
        # Layers 1 to 3 of that forward never came.
        cache.update(states, states, 0)
        with pytest.raises(errors.EngineError, match="ended before its last layer"):
            cache.update(states, states, 1)
        cache.reset()
        feed(kit, cache, 3)


def test_untested_transformers_version_is_rejected(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.models["full"]
    monkeypatch.setattr(kit.transformers, "__version__", "5.31.0")
    with kit.ElasticCache.for_model(model) as cache:
        feed(kit, cache, 1)
    monkeypatch.setenv("KVELASTIC_STRICT", "true")
    with pytest.raises(errors.UnsupportedEngineError, match=r"5\.17\.x.*this is 5\.31\.0"):
        kit.ElasticCache.for_model(model)
    monkeypatch.delenv("KVELASTIC_STRICT")
    monkeypatch.setattr(kit.transformers, "__version__", "6.0.0")
    with pytest.raises(errors.UnsupportedEngineError, match="set KVELASTIC_STRICT=false"):
        kit.ElasticCache.for_model(model)
    monkeypatch.setenv("KVELASTIC_STRICT", "false")
    with kit.ElasticCache.for_model(model) as cache:
        feed(kit, cache, 1)
    monkeypatch.setattr(kit.transformers.cache_utils, "get_layer_types_and_kwargs", lambda: None)
    with pytest.raises(errors.UnsupportedEngineError, match="get_layer_types_and_kwargs"):
        kit.ElasticCache.for_model(model)


def test_forked_child_changes_nothing(kit: SimpleNamespace) -> None:
    with kit.ElasticCache.for_model(kit.models["full"]) as cache:
        feed(kit, cache, 3)
        states = kit.torch.zeros(1, 2, 1, 32)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                cache.update(states, states, 0)
            except errors.DeviceUnavailableError:
                cache.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.get_seq_length() == 3
        assert mapped_bytes(cache) == PAGE_BYTES
        feed(kit, cache, 3)


def test_package_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, kvelastic.integration.transformers as package\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert not hasattr(package, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_killed_cache_process_frees_the_simulated_gpu(tmp_path: Path) -> None:
    """The same code over the CUDA driver; who is killed leaves nothing of the device taken."""
    with SimulatedMachine(tmp_path, memory_bytes=64 * MIB_BYTES) as machine:
        environment = os.environ | machine.readable_environment()
        del environment["KVELASTIC_HOST_MEMORY"]
        ran = subprocess.run(
            [sys.executable, PROGRAMS / "gpu_elastic_cache.py"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        found = json.loads(ran.stdout)
        assert found["equal"] == [True, True]
        assert (found["mapped_bytes"], found["bytes_after_reset"]) == (2 * PAGE_BYTES, PAGE_BYTES)
        assert found["device"].startswith("GPU-")
        assert machine.used_bytes() == 0
    segment.reap()
    ledger.reap()
