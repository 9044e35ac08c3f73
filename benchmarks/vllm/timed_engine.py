"""Runs vLLM in this very process and times its scheduler: `timed_engine.py PLAN_JSON`.

The plan says what to serve and where to write what was found; `step_cost` makes it. The model is
loaded and never asked: answers are made up, so that thousands of steps take seconds. The scheduler
and kvelastic know nothing of it; blocks are taken, mapped and given back as they always are.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm_server import BLOCK_TOKENS, MAX_MODEL_TOKENS

PROFILE_LINES = 20
PROFILE_ROUNDS = 5


class Timed:
    """Stands before the calls of one scheduler; a step is a `schedule` and what came of it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.profiler: cProfile.Profile | None = None
        self._freed_ns = 0
        scheduler.schedule = self._wrapped(scheduler.schedule, self._scheduled)
        scheduler.update_from_output = self._wrapped(scheduler.update_from_output, self._updated)
        manager = scheduler.kv_cache_manager
        manager.free = self._free(manager.free)
        self.forget()

    def forget(self) -> None:
        """Begin a round."""
        self.ns: dict[str, list[int]] = {"schedule": [], "update_from_output": [], "free": []}
        self.cpu_ns: list[int] = []
        """Of this thread, of both calls: no other process is in it."""
        self.shapes: list[tuple[int, int]] = []
        self.preempted = 0

    def _wrapped(
        self, call: Callable[..., Any], note: Callable[[Any, int, int], None]
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.profiler is not None:
                self.profiler.enable()
            cpu_begin, begin = time.thread_time_ns(), time.perf_counter_ns()
            answer = call(*args, **kwargs)
            end, cpu_end = time.perf_counter_ns(), time.thread_time_ns()
            if self.profiler is not None:
                self.profiler.disable()
            note(answer, end - begin, cpu_end - cpu_begin)
            return answer

        return timed

    def _free(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(request: Any) -> None:
            begin = time.perf_counter_ns()
            call(request)
            self._freed_ns += time.perf_counter_ns() - begin

        return timed

    def _scheduled(self, output: Any, ns: int, cpu_ns: int) -> None:
        self._freed_ns = 0  # of preemptions: part of `schedule`
        self.ns["schedule"].append(ns)
        self.cpu_ns.append(cpu_ns)
        self.shapes.append((output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)))
        self.preempted += len(output.preempted_req_ids or ())

    def _updated(self, _: Any, ns: int, cpu_ns: int) -> None:
        self.ns["update_from_output"].append(ns)
        self.ns["free"].append(self._freed_ns)
        self.cpu_ns[-1] += cpu_ns


class MadeUpModel:
    """Stands where the executor would ask the workers, and answers with tokens at once."""

    def __init__(self, core: Any) -> None:
        self._requests = core.scheduler.requests
        self._answer: Any = None
        core.model_executor.execute_model = self._execute
        core.model_executor.sample_tokens = self._sample

    def _execute(self, output: Any, non_block: bool = False) -> Future[Any]:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        tokens = [
            [] if self._requests[each].is_prefill_chunk else [3 + index]
            for index, each in enumerate(ids)
        ]
        positions = {each: index for index, each in enumerate(ids)}
        self._answer = ModelRunnerOutput(ids, positions, sampled_token_ids=tokens)
        return self._done()

    def _sample(self, _: Any, non_block: bool = False) -> Future[Any]:
        return self._done()

    def _done(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._answer)
        return future


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    from vllm import LLM

    engine = LLM(
        plan["model"],
        dtype="float32",
        max_model_len=MAX_MODEL_TOKENS,
        max_num_seqs=plan["most_at_once"],
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=plan["kv_cache_bytes"],
    )
    core = engine.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    MadeUpModel(core)
    timed = Timed(scheduler)
    found: dict[str, Any] = {}
    for name, (requests, at_once) in plan["loads"].items():
        scheduler.max_num_active_reqs = at_once
        found[name] = {"ns": {}, "cpu_ns": [], "shapes": [], "preempted": 0}
        for repeat in range(plan["repeats"] + 1):
            begin_s = time.perf_counter()
            _round(engine, timed, requests)
            print(f"{name}: {len(timed.shapes)} steps in {time.perf_counter() - begin_s:.1f} s")
            if repeat == 0:
                continue  # warms up
            for call, each in timed.ns.items():
                found[name]["ns"].setdefault(call, []).append(each)
            found[name]["cpu_ns"].append(timed.cpu_ns)
            found[name]["shapes"].append(timed.shapes)
            found[name]["preempted"] = timed.preempted
    found["profile"] = _profile(engine, timed, *plan["loads"]["mixed"])
    Path(plan["result"]).write_text(json.dumps(found))


def _round(engine: Any, timed: Timed, requests: list[tuple[list[int], int]]) -> None:
    """All requests from an empty prefix cache, so every round has the same steps."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    timed.forget()
    gc.collect()
    engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests],
        use_tqdm=False,
    )


def _profile(engine: Any, timed: Timed, requests: Any, at_once: int) -> list[str]:
    """Where kvelastic's own part goes, by this thread's CPU time; profiled calls cost more."""
    engine.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = at_once
    timed.profiler = cProfile.Profile(time.thread_time)
    steps = 0
    for _ in range(PROFILE_ROUNDS):
        _round(engine, timed, requests)
        steps += len(timed.shapes)
    functions: dict[Any, Any] = vars(pstats.Stats(timed.profiler))["stats"]
    own = [
        (own_s / steps, all_s / steps, calls / steps, name, Path(file).name)
        for (file, _, name), (_, calls, own_s, all_s, _) in functions.items()
        if "/kvelastic/" in file or "_vmm" in name
    ]
    return ["cProfile, us a step: own, with callees; calls a step"] + [
        f"{1e6 * own_s:7.2f} {1e6 * all_s:7.2f} {calls:6.2f}  {name} ({file})"
        for own_s, all_s, calls, name, file in sorted(own, reverse=True)[:PROFILE_LINES]
    ]


if __name__ == "__main__":
    main(sys.argv[1])
