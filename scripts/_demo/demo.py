"""`scripts/demo`: shows what kvelastic does, with a real model."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import psutil
import shared_files
from by_hand import AFTERWARDS, LINES
from client import AT_ONCE, Burst, RequestFailedError, ask
from engines import BLOCK_TOKENS, ENGINES, DemoEngine, Server
from front import FIRST, SECOND, Front
from survival import DIARY, LOG, Asked, Where, ask_long, table, wait_until_copied
from view import LiveView, Memory, Waiting, legend, megabytes

from kvelastic.errors import KvelasticError, SegmentError
from kvelastic.shared import segment

LOW_LIMIT = "96M"
NAME = f"demo_{os.getpid()}"
SECOND_NAME = f"{NAME}_second"
KVCTL = str(Path(sys.executable).with_name("kvctl"))
QUESTIONS = [
    "What is the capital of France? Answer in one sentence.",
    "Name the four seasons of the year.",
    "What is 2 + 3? Answer with the number only.",
]
ANSWER_TOKENS = 40
BURST_OF_FEW = 8
TIER_BYTES = 1 << 30
IDLE_TRIM_S = 3.0
TRIM_DEADLINE_S = 10.0
ASLEEP_S = 3.0
LOG_LINES = 40
ENGINES_OWN = "sglang_"
"""Prefix of SGLang's own files, which it leaves because it ends its processes by SIGKILL."""


class DemoError(Exception):
    """The demo cannot continue. The message is for the user."""


FAILURES = (
    DemoError,
    RequestFailedError,
    KvelasticError,
    AssertionError,  # from the servers
    OSError,
    http.client.HTTPException,
    subprocess.TimeoutExpired,
    psutil.Error,
)


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


@dataclass(frozen=True)
class Shown:
    """The subject of the demo: an engine, its model, and a server."""

    engine: DemoEngine
    model: Path
    server: Any

    @property
    def kv_bytes(self) -> int:
        return self.engine.kv_bytes

    def ask(self, question: str) -> str:
        name = self.engine.model_name(self.model)
        return ask(self.server.port, question, ANSWER_TOKENS, name)

    def burst(self, count: int) -> Burst:
        return Burst(self.server.port, count, self.engine.model_name(self.model))

    def ask_long(self, what: str, prompt: str = LOG) -> Asked:
        name = self.engine.model_name(self.model)
        return ask_long(Where(self.server.port, name, NAME, BLOCK_TOKENS), what, prompt)

    def held(self) -> str:
        """Return the memory reported by the instance and by the operating system, as text."""
        said = Memory.of(NAME).mapped
        real = self.engine.held_bytes(self.server)
        return f"the instance reports {megabytes(said)} held, the kernel {megabytes(real)}"


def pids(server: Server) -> list[int]:
    """Return the ids of the server's running processes."""
    try:
        leader = psutil.Process(server.process.pid)
        return [leader.pid, *(child.pid for child in leader.children(recursive=True))]
    except psutil.Error:
        return []


def kvctl(*arguments: str) -> str:
    """Run kvctl; return the lines to show, with the command."""
    done = subprocess.run([KVCTL, *arguments], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().replace("\n", "\n    ")
    if done.returncode:
        raise DemoError(
            f"kvctl {' '.join(arguments)} failed with exit code {done.returncode}: {said}"
        )
    return f"  $ kvctl {' '.join(arguments)}\n    {said}"


def questions(shown: Shown) -> list[str]:
    answers = []
    for question in QUESTIONS:
        answers.append(shown.ask(question))
        print(f"  Q: {question}\n  A: {_indented(answers[-1])}", flush=True)
    return answers


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")


def burst(shown: Shown) -> None:
    print(f"  before: {shown.held()}", flush=True)
    with (
        LiveView(NAME, "burst", shown.kv_bytes) as view,
        shown.burst(shown.engine.burst_requests) as requests,
    ):
        stories = requests.wait()
    print(
        f"  {len(stories)} answers, {sum(map(len, stories))} characters;"
        f" peak of mapped memory: {megabytes(view.most_mapped_bytes)}",
        flush=True,
    )


def limited_burst(shown: Shown, answers: list[str]) -> None:
    count = shown.engine.burst_requests
    before = shown.engine.preempted(shown.server)
    with LiveView(NAME, "limited", shown.kv_bytes) as view, shown.burst(count) as requests:
        requests.wait(5)
        view.say(f"  {requests.done} of {count} requests are done; lower the limit:")
        asked_s = time.monotonic()
        view.say(kvctl("limit", NAME, LOW_LIMIT, "--wait", "300"))
        view.say(f"    {time.monotonic() - asked_s:.1f} s after the request, under load")
        view.show()
        again = shown.ask(QUESTIONS[0])
        stories = requests.wait()
    same = "same as above" if again == answers[0] else "different from above"
    after = shown.engine.preempted(shown.server)
    preempted = ""
    if before is not None and after is not None:
        preempted = f", after {after - before} {shown.engine.gives_way}"
    print(f"  all {len(stories)} requests finished{preempted}")
    print(f"  the last story begins: {stories[-1][:100]!r}")
    print(f"  Q: {QUESTIONS[0]}\n  A: {again} ({same})")
    print(f"  after: {shown.held()}", flush=True)


def idle(shown: Shown) -> None:
    print(kvctl("limit", NAME, megabytes(shown.kv_bytes), "--wait", "10"), flush=True)
    with LiveView(NAME, "idle", shown.kv_bytes) as view:
        with shown.burst(BURST_OF_FEW) as requests:
            requests.wait()
        view.say(f"  {BURST_OF_FEW} more requests are done; the instance is idle now")
        deadline = time.monotonic() + 2 * IDLE_TRIM_S + TRIM_DEADLINE_S
        while Memory.of(NAME).parked and time.monotonic() < deadline:
            time.sleep(0.1)
    print(f"  the parked pages were released:\n  {shown.held()}")
    page_bytes = _facts(NAME)["page_bytes"]
    print("  cached blocks stay until memory is needed; a limit of one page evicts them:")
    print(kvctl("limit", NAME, megabytes(page_bytes), "--wait", "10"))
    _wait(lambda: Memory.of(NAME).mapped <= page_bytes, "all memory except one page is released")
    print(f"  {shown.held()};\n  one page always stays mapped")
    print(kvctl("list"), flush=True)


def show(shown: Shown) -> None:
    count = shown.engine.burst_requests
    title("2. Questions")
    answers = questions(shown)
    title(f"3. A burst of {count} requests, {min(count, AT_ONCE)} at once: memory grows with use")
    if not sys.stdout.isatty():
        print(legend(shown.kv_bytes))
    burst(shown)
    title(f"4. Another burst, and the limit lowered to {LOW_LIMIT} while it runs")
    limited_burst(shown, answers)
    title("5. The limit raised to the whole cache, a few requests, then idle")
    idle(shown)


def start(shown: Shown) -> None:
    started_s = time.monotonic()
    with Waiting("starting (half a minute, longer on a busy machine)"):
        shown.server.wait_until_ready()
    print(f"  ready after {time.monotonic() - started_s:.0f} s\n  {shown.held()}", flush=True)


def sleep(shown: Shown) -> None:
    """Show sleep and wake, for engines without tiers."""
    title("6. Sleep: the instance holds no memory, and requests wait until it wakes")
    print(f"  {shown.engine.without_tiers} (docs/tiers.md)")
    print(kvctl("limit", NAME, megabytes(shown.kv_bytes), "--wait", "10"))
    before = shown.ask(QUESTIONS[0])
    print(f"  {shown.held()}")
    print(kvctl("sleep", NAME, "--wait", "60"))
    print(f"  {shown.held()}", flush=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(shown.ask, QUESTIONS[0])
        asked_s = time.monotonic()
        wait([waiting], timeout=ASLEEP_S)
        if waiting.done():
            raise DemoError(f"a sleeping model answered a request: {waiting.result()!r}")
        print(f"  a request has waited {time.monotonic() - asked_s:.1f} s")
        print(kvctl("wake", NAME, "--wait", "60"))
        woken_s = time.monotonic()
        again = waiting.result()
    if again != before:
        raise DemoError(f"the answer differs: {before!r} before the sleep, {again!r} after it")
    print(
        f"  answered {time.monotonic() - woken_s:.1f} s after the wake, with the same text: {again}"
    )
    print(f"  {shown.held()}", flush=True)


def survive(shown: Shown, restart: Callable[[str], Shown], files: set[Path]) -> Shown:
    """Show a long prompt that survives a limit and kills, and one that is killed too early.

    Returns the last server, which replaces the given one.
    """

    def again(policy: str) -> Shown:
        shown.server.kill()
        print(f"  SIGKILL to every process of the server; restart with {policy}", flush=True)
        started = restart(policy)
        start(started)
        files.update(shared_files.in_use_by(pids(started.server)))
        started.ask(QUESTIONS[0])  # trigger the engine's one-time work
        return started

    title("6. KV that survives in a tier: a long prompt after a low limit, and after kills")
    whole = megabytes(shown.kv_bytes)
    print(kvctl("limit", NAME, whole, "--wait", "10"))
    log = [shown.ask_long("log: cold")]
    print(f"  a prompt of {log[0].tokens} tokens; the answer begins: {log[0].answer[:60]!r}")
    log.append(shown.ask_long("log: own prefix cache"))
    print(kvctl("limit", NAME, megabytes(_facts(NAME)["page_bytes"]), "--wait", "60"))
    print(f"  {shown.held()}")
    print(kvctl("limit", NAME, whole, "--wait", "10"))
    log.append(_from_tiers(shown.ask_long("log: after a limit of one page")))
    print("  write_back (the default) copies a block when it is evicted, or after the engine has")
    print("  been idle for 5 s. When the log is on the disk, a second prompt follows, the diary:")
    seconds = wait_until_copied(NAME)
    print(
        f"  copied after {seconds:.0f} s; the server is killed right after the diary's answer",
        flush=True,
    )
    diary = [shown.ask_long("diary: cold", DIARY)]
    shown = again("write_through")
    log.append(_from_tiers(shown.ask_long("log: killed after it was copied")))
    diary.append(shown.ask_long("diary: killed at once, write_back", DIARY))
    print("  write_through copies a block as soon as it is cached:")
    seconds = wait_until_copied(NAME, least_s=0.0)
    print(f"  all blocks were on the disk {seconds:.1f} s after the answer", flush=True)
    shown = again("write_through")
    diary.append(_from_tiers(shown.ask_long("diary: killed later, write_through", DIARY)))
    print(table([*log, *diary]))
    for asked in (log, diary):
        if len({one.answer for one in asked}) > 1:
            raise DemoError(f"the answers differ: {[one.answer for one in asked]}")
    print("  both prompts: all answers are identical")
    print(kvctl("tiers", NAME), flush=True)
    return shown


def _from_tiers(asked: Asked) -> Asked:
    if not asked.loaded:
        raise DemoError(f"{asked.what}: no token of {asked.tokens} was loaded from the disk")
    return asked


def two_models(shown: Shown, folder: Path, files: set[Path]) -> None:
    title("7. The controller: a second model, and one address for both")
    print(kvctl("limit", NAME, "256M", "--wait", "10"))
    names = (NAME, SECOND_NAME)
    with Front(folder, shown.engine, shown.server, shown.model, names) as front:
        try:
            behind_one_address(front, files)
        except FAILURES:
            print(front.log_end(LOG_LINES), file=sys.stderr)
            raise


def behind_one_address(front: Front, files: set[Path]) -> None:
    print(f"  $ kvelastic-controller --config {front.config.name}", flush=True)
    with Waiting(f"the controller starts {SECOND}"):
        front.wait_until_ready()
    files |= shared_files.in_use_by(front.pids())
    print(f"  {front.states()}")
    answers = {name: front.ask(name, QUESTIONS[0], ANSWER_TOKENS) for name in (FIRST, SECOND)}
    for name, answer in answers.items():
        print(f"  to {name}: {QUESTIONS[0]}\n    {answer}", flush=True)
    print(kvctl("list"), flush=True)
    print(f"  $ curl -X POST :{front.port}/action/sleep/{SECOND}")
    print(f"    {front.call('POST', f'/action/sleep/{SECOND}')['message']}")
    if front.engine.without_sleep:
        print(f"    {front.engine.title}: {front.engine.without_sleep}")
    _wait(lambda: _mapped_bytes(SECOND_NAME) == 0, "the sleeping model has released its memory")
    print(f"  {front.states()}")
    print(kvctl("list"), flush=True)
    began_s = time.monotonic()
    again = front.ask(SECOND, QUESTIONS[0], ANSWER_TOKENS)
    if again != answers[SECOND]:
        raise DemoError(f"{SECOND}: {answers[SECOND]!r} before the sleep, {again!r} after it")
    print(f"  to the sleeping model {SECOND}: {QUESTIONS[0]}\n    {again}")
    print(
        f"    wake and answer took {time.monotonic() - began_s:.1f} s; {front.states()}",
        flush=True,
    )
    code = front.stop()
    print(f"  SIGTERM: the controller stopped {SECOND} and exited with code {code}", flush=True)


def _facts(name: str) -> dict[str, int]:
    with segment.open_readonly(name) as instance:
        return dict(instance.control_block.read_usage())


def _mapped_bytes(name: str) -> int:
    """Return the mapped bytes of an instance; 0 after it has stopped."""
    try:
        return _facts(name)["mapped_bytes"]
    except SegmentError:
        return 0


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TRIM_DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(f"not reached within {TRIM_DEADLINE_S:g} s: {what}")
        time.sleep(0.05)


def end(shown: Shown, files: set[Path]) -> None:
    title("8. The end")
    shown.server.stop()
    files_left = shared_files.left(files)
    print(f"  the servers and their processes have ended; {len(files_left) or 'none'} of their"
          f" {len(files)} files in /dev/shm remain")  # fmt: skip
    engines_own = [path for path in files_left if path.name.startswith(ENGINES_OWN)]
    files_left = [path for path in files_left if path not in engines_own]
    if engines_own:
        names = ", ".join(path.name for path in engines_own)
        print(f"  the demo removes files that {shown.engine.title} left: {names}", flush=True)
    if files_left:
        print("  a killed process leaves its segment; kvctl gc removes it:")
        print(kvctl("gc"), flush=True)
        files_left = shared_files.left(files_left)
    ours = {NAME, SECOND_NAME}
    segments_left = [info.name for info in segment.list_segments() if info.name in ours]
    if files_left or segments_left:
        raise DemoError(
            f"files left in shared memory: {', '.join(map(str, files_left))} {segments_left}"
        )


def by_hand() -> None:
    title("Do the same by hand, with vLLM, in this folder")
    print("\n".join(f"    {line}" for line in LINES))
    print(f"  {AFTERWARDS}", flush=True)


def clean_up(servers: list[Server], files: set[Path]) -> None:
    """After Ctrl-C or a failure: end all our processes, and remove our shared memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
    for server in servers:
        files |= shared_files.in_use_by(pids(server))
        server.kill()
    shared_files.remove(files | {shared_files.SHM / name for name in (NAME, SECOND_NAME)})


def main(engine: DemoEngine, model: Path) -> None:
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_IDLE_TRIM_SECONDS": str(IDLE_TRIM_S),
    }
    with_tiers = "" if engine.without_tiers else " and a disk tier"
    title(
        f"1. {engine.title} with ENABLE_KVELASTIC=true{with_tiers}, serving SmolLM2-135M-Instruct"
        " on the CPU"
    )
    files: set[Path] = set()
    servers: list[Server] = []
    with TemporaryDirectory(prefix="kvelastic-demo-") as folder:
        if not engine.without_tiers:
            tier = Path(folder) / "tier"
            tier.mkdir(0o700)
            environment["KVELASTIC_TIERS"] = f"disk:{tier}:{TIER_BYTES}"

        def begin(policy: str = "write_back") -> Shown:
            log = Path(folder) / f"server_{len(servers)}.log"
            own = environment | {"KVELASTIC_TIER_POLICY": policy}
            servers.append(engine.serve(model, log, own))
            return Shown(engine, model, servers[-1])

        shown = begin()
        try:
            start(shown)
            files |= shared_files.in_use_by(pids(shown.server))
            show(shown)
            if not engine.without_tiers:
                shown = survive(shown, begin, files)
            else:
                sleep(shown)
            two_models(shown, Path(folder), files)
            end(shown, files)
            by_hand()
        except FAILURES as error:
            lines = servers[-1].log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            print("\n".join(["", "Last lines of the server's log:", *lines]), file=sys.stderr)
            # VllmServer's message contains the log, which is already printed above.
            reason = str(error).partition(":")[0] if isinstance(error, AssertionError) else error
            raise SystemExit(f"\nThe demo failed: {reason or type(error).__name__}") from None
        finally:
            clean_up(servers, files)


def interrupted(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        main(ENGINES[sys.argv[1]], Path(sys.argv[2]))
    except KeyboardInterrupt:
        print(
            "\nInterrupted: the server was stopped and its files in /dev/shm were removed.",
            file=sys.stderr,
        )
        sys.exit(130)
