"""Continuous batching of transformers over a tiny random model or one on disk, told line by line.

    PYTHONPATH=.venv/transformers-5.17 transformers_engine.py --num-blocks 64 --block-tokens 16

The first answer says whether it started. After it, each line of stdin is a command in JSON, and
each line of stdout its answer (what the engine itself prints goes to stderr)::

    {"do": "submit", "prompts": [[5, 6, 7]], "max_new_tokens": [20]}  -> {"ids": ["r0"]}
                         with "sequences": 3 each has two children, whose ids come last
    {"do": "wait", "ids": ["r0"], "timeout_s": 60}   -> {"tokens": {"r0": [..]}, "errors": {}, ..}
    {"do": "timed", "prompts": .., ..}    both, with total_s, and cpu_s of the process
    {"do": "cancel", "id": "r0"}                     -> {"cancelled": true}
    {"do": "counters"}   preemptions, prefix_tokens, active, waiting, cached_blocks, is_alive
    {"do": "zero"}       overwrite every cached block with zeros
    {"do": "generate_batch", "prompts": .., "max_new_tokens": 20}    -> {"tokens": [[..], ..]}
    {"do": "pad"}        batches are padded from here on, as they are for CUDA graphs
    {"do": "restart"}    stop and start again, with the manager kept
    {"do": "stop"}

All prompts of a `submit` enter the same step, so that equal commands give equal batches. A prompt's
answer never ends early. `transformers_process.py` speaks this.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import IO, Any

VOCABULARY = 512
SLIDING_WINDOW = 64
STOP_DEADLINE_S = 240.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--no-block-sharing", action="store_true")
    # mistral: every layer with a sliding window; gemma: half of them.
    parser.add_argument("--model", choices=("llama", "mistral", "gemma"), default="llama")
    # A model on disk instead, in the same dtype and attention.
    parser.add_argument("--folder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa")
    # The engine's own thread makes the cache, and not this one before it.
    parser.add_argument("--no-warmup", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    return parser.parse_args(arguments)


def make_model(options: argparse.Namespace) -> Any:
    import torch
    import transformers

    how = {"dtype": getattr(torch, options.dtype), "attn_implementation": options.attention}
    if options.folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(options.folder, **how).eval()
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        # Large weights: greedy answers vary with every token of the prompt, and wrong KV shows.
        "initializer_range": 0.2,
    }
    if options.model == "llama":
        config = transformers.LlamaConfig(**shape)
    elif options.model == "mistral":
        config = transformers.MistralConfig(**shape, sliding_window=SLIDING_WINDOW)
    else:
        kinds = ["sliding_attention", "full_attention"] * (options.layers // 2)
        config = transformers.Gemma2Config(
            **shape, sliding_window=SLIDING_WINDOW, layer_types=kinds
        )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, **how).eval()


def make_config(options: argparse.Namespace) -> Any:
    from transformers import ContinuousBatchingConfig

    names = {field.name for field in fields(ContinuousBatchingConfig)}
    block_tokens = "page_size" if "page_size" in names else "block_size"
    return ContinuousBatchingConfig(
        num_blocks=options.num_blocks,
        max_batch_tokens=options.max_batch_tokens,
        allow_block_sharing=not options.no_block_sharing,
        **{block_tokens: options.block_tokens},
        **{name: json.loads(text) for name, _, text in (one.partition("=") for one in options.set)},
    )


class Watch:
    """Counts what the engine does; set over whatever else is hooked into it."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        """Held while prompts are put in: no step begins."""
        self.preemptions = 0
        self.prefix_tokens = 0
        self.changed = threading.Condition()
        self.cancelled: set[str] = set()
        self.processor: Any = None

    def install(self) -> None:
        from transformers.generation.continuous_batching import (
            cache,
            continuous_api,
            offloading_manager,
            scheduler,
        )

        self._wrap(continuous_api.ContinuousBatchProcessor, "prepare_next_batch", self._prepare)
        self._wrap(offloading_manager.OffloadingManager, "offload_requests", self._offload)
        self._wrap(cache.PagedAttentionCache, "search_prefix_match", self._search)
        self._wrap(scheduler.Scheduler, "clear_cancelled_requests", self._clear_cancelled)

    @staticmethod
    def _wrap(owner: type, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any) -> Any:
            return wrapper(original, *args)

        setattr(owner, name, wrapped)

    def _prepare(self, original: Any, processor: Any) -> Any:
        with self.gate:
            pass
        self.processor = processor
        return original(processor)

    def _offload(self, original: Any, manager: Any) -> Any:
        before = set(manager.scheduler.active_requests)
        answer = original(manager)
        waiting = manager.scheduler.waiting_requests
        self.preemptions += sum(1 for request in before if request in waiting)
        return answer

    def _search(self, original: Any, cache: Any, *args: Any) -> Any:
        found = original(cache, *args)
        self.prefix_tokens += found
        return found

    def _clear_cancelled(self, original: Any, scheduler: Any) -> Any:
        states = original(scheduler)
        with self.changed:
            self.cancelled.update(state.request_id for state in states)
            self.changed.notify_all()
        return states


class Engine:
    def __init__(self, options: argparse.Namespace, watch: Watch) -> None:
        from transformers import GenerationConfig

        self.watch = watch
        self.model = make_model(options)
        self.config = make_config(options)
        self.generation = GenerationConfig(
            do_sample=False, max_new_tokens=32, eos_token_id=-1, pad_token_id=0
        )
        self.results: dict[str, Any] = {}
        self.submitted = 0
        self.has_warmup = not options.no_warmup
        self.start()

    def start(self) -> None:
        self.manager = self.model.init_continuous_batching(
            generation_config=self.generation, continuous_batching_config=self.config
        )
        if self.has_warmup:
            self.manager.warmup()
        self.manager.start()
        outputs = self.manager.output_router.output_queue
        self.collector = threading.Thread(target=self._collect, args=(outputs,), daemon=True)
        self.collector.start()

    def _collect(self, outputs: Any) -> None:
        while (output := outputs.get()) is not None:
            with self.watch.changed:
                self.results[output.request_id] = output
                self.watch.changed.notify_all()

    def submit(
        self, prompts: list[list[int]], max_new_tokens: list[int], sequences: int = 1
    ) -> dict[str, Any]:
        ids = [f"r{self.submitted + i}" for i in range(len(prompts))]
        self.submitted += len(prompts)
        self.manager.num_return_sequences = sequences
        with self.watch.gate:
            accepted = [
                self.manager.add_request(prompt, request_id=name, max_new_tokens=tokens)
                for name, prompt, tokens in zip(ids, prompts, max_new_tokens, strict=True)
            ]
        refused = [name for name, one in zip(ids, accepted, strict=True) if not one]
        children = [f"{name}__child#{i}" for name in ids for i in range(sequences - 1)]
        return {"ids": ids + children, "refused": refused}

    def wait(self, ids: list[str], timeout_s: float) -> dict[str, Any]:
        with self.watch.changed:
            self.watch.changed.wait_for(
                lambda: all(name in self.results for name in ids), timeout_s
            )
            done = {name: self.results[name] for name in ids if name in self.results}
        errors = {name: one.error for name, one in done.items() if one.error is not None}
        return {
            "tokens": {name: one.generated_tokens for name, one in done.items()},
            "errors": errors,
            "unfinished": [name for name in ids if name not in done],
        }

    def timed(
        self, prompts: list[list[int]], max_new_tokens: list[int], timeout_s: float
    ) -> dict[str, Any]:
        begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
        submitted = self.submit(prompts, max_new_tokens)
        answer = self.wait(submitted["ids"], timeout_s)
        times = {
            "total_s": time.perf_counter() - begin_s,
            "cpu_s": time.process_time() - cpu_begin_s,
        }
        return {**submitted, **answer, **times}

    def cancel(self, id: str, timeout_s: float) -> dict[str, Any]:
        self.manager.cancel_request(id)
        with self.watch.changed:
            gone = self.watch.changed.wait_for(lambda: id in self.watch.cancelled, timeout_s)
        return {"cancelled": gone}

    def counters(self) -> dict[str, Any]:
        processor = self.watch.processor
        status = self.manager.background_thread_status
        return {
            "preemptions": self.watch.preemptions,
            "prefix_tokens": self.watch.prefix_tokens,
            "active": len(processor.scheduler.active_requests) if processor else 0,
            "waiting": len(processor.scheduler.waiting_requests) if processor else 0,
            "cached_blocks": self._count_cached() if processor else 0,
            "is_alive": self.manager.is_running(),
            "fatal_error": None if status.fatal_error is None else str(status.fatal_error),
        }

    def _count_cached(self) -> int:
        cache = self.watch.processor.cache
        if hasattr(cache, "cache_allocators"):  # as of 5.18
            return sum(len(each.ledger.cached_blocks) for each in cache.cache_allocators.values())
        return len(cache._block_manager._init_block_ids)

    def _cached_blocks(self) -> tuple[list[int], list[Any]]:
        """Blocks that no request has and whose contents are kept; tensors whose rows are blocks."""
        cache = self.watch.processor.cache
        if hasattr(cache, "cache_allocators"):  # as of 5.18
            (allocator,) = cache.cache_allocators.values()
            return list(allocator.ledger.cached_blocks), [allocator._copy_view]
        tensors = [*cache.key_cache, *cache.value_cache]
        rows = [one.view(-1, cache.block_size, *one.shape[1:]) for one in tensors]
        return list(cache._block_manager._init_block_ids), rows

    def zero(self) -> dict[str, Any]:
        with self.watch.gate:
            blocks, tensors = self._cached_blocks()
            for tensor in tensors:
                tensor[blocks] = 0
        return {"zeroed": len(blocks)}

    def pad(self) -> dict[str, Any]:
        with self.watch.gate:
            self.manager.batch_processor.model_runner.pad_inputs = True
        return {}

    def generate_batch(
        self, prompts: list[list[int]], max_new_tokens: int, sequences: int = 1
    ) -> dict[str, Any]:
        generation = copy.deepcopy(self.generation)
        generation.num_return_sequences = sequences
        outputs = self.model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=self.config,
            max_new_tokens=max_new_tokens,
        )
        return {
            "tokens": [one.generated_tokens for one in outputs.values()],
            "errors": [one.error for one in outputs.values() if one.error is not None],
        }

    def restart(self) -> dict[str, Any]:
        self._stop(kept=True)
        self.start()
        return {"is_alive": self.manager.is_running()}

    def stop(self) -> dict[str, Any]:
        self._stop(kept=False)
        return {"is_alive": self.manager.is_running()}

    def _stop(self, *, kept: bool) -> None:
        # hard_stop: what waits for memory that never comes would be waited for.
        self.manager.stop(
            block=True, timeout=STOP_DEADLINE_S, keep_for_next_session=kept, hard_stop=True
        )
        self.manager.output_router.output_queue.put(None)
        # A daemon that drops the last reference to a tensor while Python ends takes it down.
        self.collector.join()


def main(arguments: list[str]) -> None:
    # Answers go out where stdout was; nothing else does.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        serve(parse(arguments), answers)


def serve(options: argparse.Namespace, answers: IO[str]) -> None:
    def answer(**values: Any) -> None:
        with suppress(BrokenPipeError):
            answers.write(json.dumps(values) + "\n")

    try:
        import transformers

        watch = Watch()
        watch.install()
        engine = Engine(options, watch)
    except Exception as error:
        answer(is_ready=False, error=type(error).__name__, message=str(error))
        raise
    answer(is_ready=True, version=transformers.__version__)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer(**getattr(engine, do)(**command))
        if do == "stop":
            return
    engine.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
