"""`scripts/demo --prefill-decode`: one vLLM computes prompts, another decodes them.

Both are behind the controller. Shows that the tokens are those of one engine, what was transferred,
and a request after the prefill engine was killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import shared_files
from client import Burst, ask
from demo import (
    FAILURES,
    LOG_LINES,
    NAME,
    QUESTIONS,
    SECOND_NAME,
    DemoError,
    clean_up,
    interrupted,
    kvctl,
    pids,
    title,
)
from engines import BLOCK_TOKENS, ENGINES, Server
from front import Controller
from ports import free_port
from survival import ANSWER_TOKENS, DIARY, LOG, NOTES, Asked, Where, ask_long, table
from view import Waiting

DECODE, PREFILL = NAME, SECOND_NAME
CHAT, POOL = "chat", "chat-prefill"
STORIES = 12
SLOWEST_PROMPT_S = 300


def serve(model: Path, folder: Path, role: str, instance: str) -> Any:
    """Start an engine with a role."""
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_ROLE": role,
        "KVELASTIC_IPC_NAME": instance,
        # By default an engine computes a prompt if that is faster than to read it, as a small model
        # on an idle machine may be.
        "KVELASTIC_TIER_COMPARE": "false",
    }
    return ENGINES["vllm"].serve(model, folder / f"{role}.log", environment)


def settings_of(port: int, decode_port: int, prefill_port: int) -> dict[str, Any]:
    """Return the controller's configuration."""
    each = {"engine": "vllm", "served_name": "m"}
    return {
        "server": {"port": port, "log_requests": False},
        "models": [
            {
                "name": CHAT,
                "url": f"http://127.0.0.1:{decode_port}",
                "instance": DECODE,
                "prefill": POOL,
                **each,
            },
            {
                "name": POOL,
                "url": f"http://127.0.0.1:{prefill_port}",
                "instance": PREFILL,
                "timeouts": {"idle": SLOWEST_PROMPT_S},
                **each,
            },
        ],
    }


class Pair:
    """The two engines, and the controller in front of them."""

    def __init__(self, prefill: Server, decode: Server, front: Controller) -> None:
        self.prefill, self.decode, self.front = prefill, decode, front

    def ask_both(self, what: str, prompt: str) -> Asked:
        """Ask through the controller, so that the prefill engine computes the prompt."""
        return ask_long(Where(self.front.port, CHAT, DECODE, BLOCK_TOKENS), what, prompt)

    def ask_decode(self, what: str, prompt: str) -> Asked:
        """Ask the decode engine, which computes the prompt itself."""
        return ask_long(Where(self.decode.port, "m", DECODE, BLOCK_TOKENS), what, prompt)

    def answer_of_one(self, prompt: str) -> str:
        """Return the answer of the prefill engine, which then decodes too."""
        return ask(self.prefill.port, prompt, ANSWER_TOKENS, "m")

    def prompts_sent(self) -> int:
        """Return the number of prompts that the pool has got since the start."""
        stats = self.front.call("GET", f"/traffic/stats/{POOL}")["model_stats"]
        return int(stats["requests_since_start"])

    def fallbacks(self) -> dict[str, int]:
        """Return how many prompts the pool has not computed, by reason."""
        found: dict[str, int] = self.front.call("GET", "/models")["models"][CHAT][
            "prefill_fallbacks"
        ]
        return found


def same_tokens(pair: Pair) -> None:
    for question in QUESTIONS[:1]:
        pair.front.ask(CHAT, question, ANSWER_TOKENS)  # trigger the engines' one-time work
    rows = [
        pair.ask_both("log: through the controller", LOG),
        pair.ask_decode("diary: by the decode engine alone", DIARY),
    ]
    print(table(rows, "the prefill engine"))
    if not rows[0].loaded:
        raise DemoError(f"no block was read from the prefill engine: {pair.fallbacks()}")
    for asked, prompt in zip(rows, (LOG, DIARY), strict=True):
        alone = pair.answer_of_one(prompt)
        if asked.answer != alone:
            raise DemoError(f"{asked.what}: {asked.answer!r}, but one engine answers {alone!r}")
    print("  both answers are those of one engine; the log's begins:")
    print(f"    {rows[0].answer[:100]!r}", flush=True)


def burst(pair: Pair) -> None:
    before = pair.prompts_sent()
    with Burst(pair.front.port, STORIES, CHAT) as requests:
        stories = requests.wait()
    sent = pair.prompts_sent() - before
    print(f"  {len(stories)} answers; {sent} of the prompts went to the prefill engine first")
    shown = pair.fallbacks() or "none"
    print(f"  prompts that it has not computed, by reason: {shown}", flush=True)


def killed(pair: Pair) -> None:
    alone = pair.answer_of_one(NOTES)
    pair.prefill.kill()
    print("  SIGKILL to every process of the prefill engine", flush=True)
    asked = pair.ask_both("notes: without a prefill engine", NOTES)
    print(table([asked], "the prefill engine"))
    if asked.answer != alone:
        raise DemoError(f"the answer differs: {asked.answer!r}, before {alone!r}")
    print(f"  the same answer as of one engine; reasons now: {pair.fallbacks()}", flush=True)


def end(decode: Server, files: set[Path]) -> None:
    title("6. The end")
    decode.stop()
    left = shared_files.left(files)
    if left:
        print("  a killed process leaves its files; kvctl gc removes them:")
        print(kvctl("gc"), flush=True)
        left = shared_files.left(left)
    if left:
        raise DemoError(f"files left in shared memory: {', '.join(map(str, left))}")
    print("  all processes have ended, and none of their files in /dev/shm remains")
    print("  docs/prefill_decode.md has the same by hand, and for two hosts", flush=True)


def run(pair: Pair) -> None:
    title("2. The controller: prompts go to one engine, their tickets to the other")
    print(f"  $ kvelastic-controller --config {pair.front.config.name}", flush=True)
    with Waiting("the controller starts"):
        pair.front.wait_until_ready()
    print(f"  {pair.front.states()}")
    same_tokens(pair)
    title("3. What was transferred")
    print(kvctl("links"))
    print(kvctl("tiers", DECODE), flush=True)
    title(f"4. {STORIES} requests")
    burst(pair)
    title("5. The prefill engine is killed: the decode engine computes the prompt")
    killed(pair)


def main(model: Path) -> None:
    title("1. Two vLLM with SmolLM2-135M-Instruct on the CPU: one for prompts, one for tokens")
    files: set[Path] = set()
    servers: list[Server] = []
    with TemporaryDirectory(prefix="kvelastic-demo-") as text, ExitStack() as stack:
        folder = Path(text)
        stack.callback(clean_up, servers, files)
        for role, instance in (("prefill", PREFILL), ("decode", DECODE)):
            servers.append(serve(model, folder, role, instance))
        prefill, decode = servers
        try:
            with Waiting("starting (a minute, longer on a busy machine)"):
                for server in servers:
                    server.wait_until_ready()
            for server in servers:
                files |= shared_files.in_use_by(pids(server))
            port = free_port()
            settings = settings_of(port, decode.port, prefill.port)
            with Controller(folder, settings, port) as front:
                run(Pair(prefill, decode, front))
            end(decode, files)
        except FAILURES as error:
            for server in servers:
                lines = server.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print("\n".join(["", f"The end of {server.log.name}:", *lines]), file=sys.stderr)
            reason = str(error).partition(":")[0] if isinstance(error, AssertionError) else error
            raise SystemExit(f"\nThe demo failed: {reason or type(error).__name__}") from None


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        main(Path(sys.argv[1]))
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        print("\nInterrupted: all processes were ended, and their files removed.", file=sys.stderr)
        sys.exit(130)
