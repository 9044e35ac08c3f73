"""`scripts/demo --cluster`: two models on two hosts under Ray Serve, a burst, and a killed host.

The hosts are namespaces of this machine: each has its own network, processes and /dev/shm. If
namespaces are not allowed, the hosts are two Ray nodes that share this machine and its ledger.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import shared_files
from client import TOPICS
from demo import DemoError, title
from engines import ENGINES
from ray_hosts import MIB_PER_HOST, RayHosts
from waiting import wait_until

from kvelastic.shared import ledger, segment

FIRST, SECOND = "sun", "moon"
BURST = 24
AT_ONCE = 8
BEFORE_THE_KILL = 4
ANSWER_TOKENS = 32
START_DEADLINE_S = 1200.0
"""Three engines start at once, and share the machine's cores."""
ADDRESSES = ("127.0.0.1", "127.0.0.2")
KILL_TIMEOUT_S = 10.0
_PYTHON_FILES = ("psm_", "sem.mp-")
"""Files of Python's multiprocessing, which a killed engine leaves in /dev/shm."""


class RayNode:
    """A host without namespaces: the programs that were started in it, and their children.

    The context manager kills them and removes their files from shared memory.
    """

    def __init__(self) -> None:
        self._programs: list[subprocess.Popen[str]] = []
        self._files: set[Path] = set()

    def command(self, *command: str) -> list[str]:
        """Return the command itself."""
        return list(command)

    def start(
        self, *command: str, environment: Mapping[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program."""
        program = subprocess.Popen(command, env=dict(environment), text=True, **more)
        self._programs.append(program)
        return program

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Change nothing: there is one network."""
        yield

    def kill(self) -> None:
        """Kill the programs and their children, and wait for their end."""
        found: list[psutil.Process] = []
        for program in self._programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(program.pid)
                found += [parent, *parent.children(recursive=True)]
        self._files |= shared_files.renamed_in_use_by(process.pid for process in found)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, KILL_TIMEOUT_S)

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shared_files.remove(file for file in self._files if file.name.startswith(_PYTHON_FILES))
        segment.reap()
        ledger.reap()


def can_make_hosts() -> bool:
    """Return whether this user may create the namespaces of a host."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    spaces = ("--net", "--mount", "--pid", "--fork", "--mount-proc")
    done = subprocess.run(["unshare", *spaces, "true"], capture_output=True, check=False)
    return done.returncode == 0


def config_of(model: Path, folder: Path, capacity_mib: int) -> dict[str, Any]:
    """Return the configuration: the first model on both hosts, the second on one of them."""
    launch = ENGINES["vllm"].launch(model, folder)
    env = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_HOST_MEMORY": f"{capacity_mib}M",
        "HF_HUB_OFFLINE": "1",
        **launch["env"],
    }
    each = {
        "engine": "vllm",
        "command": launch["command"],
        "env": env,
        "served_name": "m",
        "guarantee": "32M",
        "replicas_per_node": 1,
        "num_cpus": 1,
    }
    return {
        "models": [
            {"name": FIRST, **each, "replicas": 2},
            {"name": SECOND, **each, "replicas": 1},
        ],
        "front": {"resources": {"host0": 0.01}, "retry_for": 600},
        "health": {"timeout": 3},  # the engines share this machine's cores
    }


def ask(cluster: RayHosts, model: str, question: str, max_tokens: int) -> httpx.Response:
    """Return the response to one question. Raises DemoError unless it is an answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    response = cluster.post("/v1/chat/completions", body)
    if response.status_code != 200:
        raise DemoError(f"{model} answered {response.status_code}: {response.text[:500]}")
    return response


def text_of(response: httpx.Response) -> str:
    content: str = response.json()["choices"][0]["message"]["content"]
    return content.strip()


def places(cluster: RayHosts) -> dict[str, str]:
    """Return each replica's host."""
    return {each["replica"]: each["node"] for each in cluster.replicas()}


def show(cluster: RayHosts) -> None:
    done = cluster.kvctl("list")
    print("  $ kvctl --address http://HEAD list")
    print("".join(f"    {line}\n" for line in (done.stdout + done.stderr).splitlines()), end="")


def burst(cluster: RayHosts, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Send stories to both models in turns; return the responses to come."""
    return [
        threads.submit(
            ask,
            cluster,
            (FIRST, SECOND)[number % 2],
            f"Write a story about {TOPICS[number % len(TOPICS)]}.",
            ANSWER_TOKENS * (1 + number % 3),
        )
        for number in range(BURST)
    ]


def tell(cluster_places: Mapping[str, str], answers: list[httpx.Response]) -> None:
    for name in sorted(set(cluster_places.values())):
        by = [cluster_places.get(each.headers["x-kvelastic-replica"]) for each in answers]
        print(f"  {by.count(name)} answers came from {name}")


def run(cluster: RayHosts, config: dict[str, Any]) -> None:
    title("1. Two models: sun with a replica on each host, moon with one")
    began_s = time.monotonic()
    cluster.deploy(config, START_DEADLINE_S)
    wait_until(lambda: len(cluster.replicas()) == 3)
    print(f"  ready after {time.monotonic() - began_s:.0f} s")
    show(cluster)
    title("2. Questions to both, at one address")
    question = "What is the capital of France? Answer in one sentence."
    for name in (FIRST, SECOND):
        print(f"  {name}: {text_of(ask(cluster, name, question, 24))}", flush=True)
    title(f"3. A burst of {BURST} requests, {AT_ONCE} at once")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        tell(places(cluster), [each.result() for each in burst(cluster, threads)])
    show(cluster)
    title("4. Another burst, and the second host is killed during it")
    before = places(cluster)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        waiting = burst(cluster, threads)
        for each in waiting[:BEFORE_THE_KILL]:
            each.result()
        cluster.kill_second()
        killed_s = time.monotonic()
        print(f"  killed after {sum(each.done() for each in waiting)} answers", flush=True)
        answers = [each.result() for each in waiting]
    tell(before, answers)
    again = sum(int(each.headers["x-kvelastic-tried"]) > 0 for each in answers)
    print(f"  all {len(answers)} requests were answered; {again} were sent again to the first host")
    print(f"  the last answer came {time.monotonic() - killed_s:.1f} s after the kill")
    wait_until(lambda: len(places(cluster)) == 2)
    show(cluster)


def main(model: Path) -> int:
    has_hosts = can_make_hosts()
    if has_hosts:
        print("The hosts are two namespaces of this machine.", flush=True)
        cluster = RayHosts(2)
    else:
        print("Namespaces are not allowed here: the hosts are two Ray nodes on this machine.")
        print("Each lists all engines, because they share this machine's memory.")
        print("Ray listens on all interfaces, so its connections need a token.", flush=True)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        cluster = RayHosts(2, make_host=RayNode, addresses=ADDRESSES, variables=token)
    with cluster:
        capacity_mib = MIB_PER_HOST if has_hosts else MIB_PER_HOST * 2
        try:
            run(cluster, config_of(model, cluster.folder, capacity_mib))
        except (
            DemoError,
            AssertionError,
            OSError,
            httpx.HTTPError,
            subprocess.SubprocessError,
        ) as error:
            print(f"The demo failed: {error}", file=sys.stderr)
            return 1
    print("\nAll processes have ended. docs/cluster.md has the same for real machines.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
