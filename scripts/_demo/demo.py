"""`scripts/demo`: what kvelastic does, on a real model, as a person would see it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from view import LiveView

from kvelastic import segment
from kvelastic.sizes import format_size
from tests.engines.vllm_server import VllmServer, worker_memory_bytes

MIB = 1 << 20
KV_BYTES = 1 << 30
LOW_LIMIT = "96M"
NAME = f"demo_{os.getpid()}"
KVCTL = str(Path(sys.executable).with_name("kvctl"))
SERVER_ARGUMENTS = [
    # float32: fast on every CPU, where bfloat16 is only on those with instructions for it.
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16",
    "--kv-cache-memory-bytes", str(KV_BYTES),
]  # fmt: skip
QUESTIONS = [
    "What is the capital of France? Answer in one sentence.",
    "Name the four seasons of the year.",
    "What is 2 + 3? Answer with the number only.",
]
TOPICS = ["a river", "a lighthouse", "the sea", "a small town", "an old clock", "snow", "a train"]
IDLE_TRIM_S = 3.0


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def chat(server: VllmServer, question: str, max_tokens: int) -> str:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {text.decode()[:500]}")
    answer: str = json.loads(text)["choices"][0]["message"]["content"]
    return answer.strip()


def burst(server: VllmServer, threads: ThreadPoolExecutor, count: int) -> list[Future[str]]:
    """Stories of different lengths, sixteen at once."""
    return [
        threads.submit(
            chat,
            server,
            f"Write a story about {TOPICS[i % len(TOPICS)]}. "
            + "Make it long and calm. " * (i % 12 * 5),
            64 + 16 * (i % 8),
        )
        for i in range(count)
    ]


def kvctl(*arguments: str) -> None:
    print(f"  $ kvctl {' '.join(arguments)}", flush=True)
    done = subprocess.run([KVCTL, *arguments], capture_output=True, text=True, check=False)
    print("    " + (done.stdout + done.stderr).strip().replace("\n", "\n    "), flush=True)
    if done.returncode:
        raise SystemExit(f"kvctl ended with {done.returncode}")


def held(server: VllmServer) -> str:
    """What the instance says, and what the operating system says."""
    with segment.open_readonly(NAME) as instance:
        said = instance.record.read_usage()["mapped_bytes"]
    real = worker_memory_bytes(server.processes()["worker"])
    return f"{format_size(said)} mapped by its own account, {format_size(real)} by the kernel's"


def wait_for_mapped(at_most_bytes: int, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    with segment.open_readonly(NAME) as instance:
        while instance.record.read_usage()["mapped_bytes"] > at_most_bytes:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)


def show(server: VllmServer) -> None:
    title("2. Questions")
    for question in QUESTIONS:
        print(f"  Q: {question}\n  A: {chat(server, question, 40)}", flush=True)

    title("3. A burst of 48 requests, 16 at once: memory grows with use")
    print(f"  before: {held(server)}")
    with ThreadPoolExecutor(16) as threads, LiveView(NAME, "burst") as view:
        lengths = [len(each.result()) for each in burst(server, threads, 48)]
    print(f"  {len(lengths)} answers, {sum(lengths)} characters; at most "
          f"{format_size(view.most_mapped_bytes)} were mapped")  # fmt: skip

    title(f"4. Another burst, and the limit lowered to {LOW_LIMIT} while it runs")
    with ThreadPoolExecutor(16) as threads:
        answers = burst(server, threads, 48)
        with LiveView(NAME, "before"):
            answers[4].result()
        kvctl("limit", NAME, LOW_LIMIT, "--wait", "60")
        with LiveView(NAME, "limited"):
            finished = [each.result() for each in answers]
    print(f"  all {len(finished)} requests finished under the limit; one of them begins:")
    print(f"    {finished[-1][:150]!r}")
    print(f"  after: {held(server)}")

    title("5. Idle: what was parked goes back, the prefix cache stays until it is in the way")
    kvctl("limit", NAME, "1G", "--wait", "10")
    with segment.open_readonly(NAME) as instance:
        page_bytes = instance.record.read_usage()["page_bytes"]
    with LiveView(NAME, "idle"):
        time.sleep(2 * IDLE_TRIM_S)
    kvctl("limit", NAME, str(page_bytes), "--wait", "10")
    wait_for_mapped(page_bytes, 5)
    print(f"  the cache too, when asked for: {held(server)}")
    kvctl("list")


def main(model: Path) -> None:
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_IDLE_TRIM_SECONDS": str(IDLE_TRIM_S),
    }
    title("1. vLLM with ENABLE_KVELASTIC=true, serving SmolLM2-135M-Instruct on the CPU")
    with TemporaryDirectory(prefix="kvelastic-demo-") as folder:
        log = Path(folder) / "vllm.log"
        start = time.monotonic()
        with VllmServer(model, log, environment, SERVER_ARGUMENTS) as server:
            print("  starting (half a minute) ...", flush=True)
            try:
                server.wait_until_ready()
            except AssertionError as error:
                raise SystemExit(f"the server did not start: {error}") from None
            print(f"  ready after {time.monotonic() - start:.0f} s; {held(server)}")
            show(server)
            title("6. The end")
            server.stop()
    left = [info.name for info in segment.list_segments() if info.name == NAME]
    print(f"  servers stopped; left in shared memory: {left or 'nothing'}")
    if left:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
