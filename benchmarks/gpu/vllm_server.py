"""One vLLM server, told what to do by lines of JSON: `vllm_server.py OPTIONS`.

It answers once when it is ready, then one line to each command:

    {"do": "burst", "seed": 1, "count": 22, "prompt_tokens": 1500, "new_tokens": 512, "rate": 0}
    {"do": "reset"}           forget the prefix cache

It ends with its input.

A burst's answer has each request's time to its first token, the scheduler's steps until then, and
its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Steps:
    """Counts the scheduler's steps as they arrive in this process."""

    count: int = 0

    def logger(self, *_: Any) -> Any:
        """Return a logger of statistics for vLLM, which counts here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        steps = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None: ...

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                steps.count += scheduler_stats is not None

            def log_engine_initialized(self) -> None: ...

        return Logger()


@dataclass
class Reply:
    """Of one request."""

    first_s: float = 0.0
    first_steps: int = 0
    tokens: list[int] = field(default_factory=list)


async def request(
    engine: Any, steps: Steps, sampling: Any, prompt: list[int], name: str, at: float, begun: float
) -> Reply:
    """Its time to the first token, from when it is sent at `at` seconds after the begin."""
    await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
    sent, steps_before, reply = time.monotonic(), steps.count, Reply()
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        new = output.outputs[0].token_ids
        if new and not reply.tokens:
            reply.first_s = time.monotonic() - sent
            reply.first_steps = steps.count - steps_before
        reply.tokens += list(new)
    return reply


async def burst(
    engine: Any, steps: Steps, command: dict[str, Any], vocabulary: int, serial: int
) -> dict[str, Any]:
    """Requests at once, or as a Poisson process of `rate` a second."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0,
        max_tokens=command["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    words, pauses = random.Random(command["seed"]), random.Random(command["seed"] + 7)
    begun, at, requests = time.monotonic(), 0.0, []
    for number in range(command["count"]):
        prompt = [words.randrange(3, vocabulary) for _ in range(command["prompt_tokens"])]
        requests.append(request(engine, steps, sampling, prompt, f"{serial}-{number}", at, begun))
        at += pauses.expovariate(command["rate"]) if command["rate"] else 0.0
    done = await asyncio.gather(*requests)
    return {
        "total_s": time.monotonic() - begun,
        "first_s": [reply.first_s for reply in done],
        "first_steps": [reply.first_steps for reply in done],
        "tokens": [reply.tokens for reply in done],
    }


async def serve(options: dict[str, Any], answers: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    steps = Steps()
    arguments = AsyncEngineArgs(**options["engine"])
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[steps.logger])
    answers.write(json.dumps({"ready": True}) + "\n")
    loop, serial = asyncio.get_running_loop(), 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, serial = json.loads(line), serial + 1
        if command["do"] == "burst":
            answer = await burst(engine, steps, command, options["vocabulary"], serial)
        else:
            answer = {"reset": bool(await engine.reset_prefix_cache())}
        answers.write(json.dumps(answer) + "\n")
    engine.shutdown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print
    try:
        asyncio.run(serve(json.loads(sys.argv[1]), answers))
    except BaseException as error:
        answers.write(json.dumps({"failed": repr(error)}) + "\n")
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
