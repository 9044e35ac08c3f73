"""Ray on hosts of this machine, and what tests ask of an application there.

with RayHosts(2) as cluster:
    cluster.deploy({"models": [...]})
    status, headers, body = cluster.post("/v1/completions", {...})
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import needs
from hosts import Host, link
from waiting import DEADLINE_S, wait_until

PROGRAMS = Path(__file__).parents[1] / "programs"
GCS_PORT = 6399
HTTP_PORT = 8123
MIB_PER_HOST = 256
APPLICATION = "kvelastic.integration.ray.app:build"
OBJECT_STORE_BYTES = 80_000_000


class RayHosts:
    """A head and perhaps a second host. What runs there ends with it.

    `make_host` and `addresses` replace namespaces where those are not allowed (scripts/demo).
    `variables` are added to the environment of all that runs on the hosts.
    """

    def __init__(
        self,
        count: int,
        make_host: Callable[[], Any] = Host,
        addresses: Sequence[str] | None = None,
        mib_per_host: int = MIB_PER_HOST,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="kvray")
        )  # a short path: Ray's sockets are there
        self._mib_per_host = mib_per_host
        self._variables = dict(variables or {})
        self._ends = contextlib.ExitStack()
        self._programs: dict[int, subprocess.Popen[str]] = {}
        self._ends.callback(shutil.rmtree, self.folder, ignore_errors=True)
        linked = [f"10.99.7.{number + 1}" for number in range(count)]
        self.addresses = list(addresses or (linked if count == 2 else ["127.0.0.1"]))
        try:
            self.hosts = [self._ends.enter_context(make_host()) for _ in self.addresses]
            if self.addresses == linked:
                self._link()
            self._start_ray(0, "--head", f"--port={GCS_PORT}", "--include-dashboard=false")
            for number in range(1, count):
                self._join(number)
        except BaseException:
            self._ends.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Of all that runs on the hosts."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")},
            "KVELASTIC_LEDGER": "cluster",
            "PID_OF_TEST_RUN": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",
            "TMPDIR": str(self.folder),  # replicas' logs, engines' files
            # A host that is gone is found out in some seconds, not in half a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            **self._variables,
        }

    def _link(self) -> None:
        (one, other), (address, other_address) = self.hosts, self.addresses
        link(one, other, address, other_address)

    def _join(self, number: int) -> None:
        self._start_ray(number, f"--address={self.addresses[0]}:{GCS_PORT}")

    def _start_ray(self, number: int, *arguments: str) -> None:
        log = self.folder / f"ray{number}.log"
        resources = json.dumps({"kvelastic_mib": self._mib_per_host, f"host{number}": 100})
        with log.open("w") as file:
            program = self.hosts[number].start(
                str(needs.RAY_PYTHON.with_name("ray")),
                "start",
                *arguments,
                f"--node-ip-address={self.addresses[number]}",
                "--num-cpus=4",
                f"--object-store-memory={OBJECT_STORE_BYTES}",
                f"--temp-dir={self.folder / str(number)}" if number == 0 else "--num-gpus=0",
                f"--resources={resources}",
                "--block",
                environment=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

        def has_started() -> bool:
            text = log.read_text()
            assert program.poll() is None, text
            return "Ray runtime started" in text

        wait_until(has_started, "Ray did not start")
        self._programs[number] = program

    def _run(self, *words: str, deadline_s: float = DEADLINE_S) -> str:
        address = f"{self.addresses[0]}:{GCS_PORT}"
        program = self.hosts[0].start(
            str(needs.RAY_PYTHON),
            str(PROGRAMS / "ray_deploy.py"),
            address,
            self.addresses[0],
            *words,
            environment=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said, errors = program.communicate(timeout=deadline_s)
        assert program.returncode == 0, errors + self.logs()
        return said

    def deploy(
        self,
        config: dict[str, Any],
        deadline_s: float = DEADLINE_S,
        builder: str = APPLICATION,
    ) -> None:
        """Deploy what the builder makes, or change it; returns when it serves."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        assert "deployed" in self._run(str(path), builder, deadline_s=deadline_s)

    def free_mib(self) -> dict[str, float]:
        """What Ray has left of `kvelastic_mib`, by host."""
        last = self._run("--free").splitlines()[-1]
        return {host: left.get("kvelastic_mib", 0.0) for host, left in json.loads(last).items()}

    def put_to_sleep(self, model: str) -> None:
        """Put a replica of a model of Ray Serve LLM to sleep."""
        self._run(f"--sleep={model}")

    def logs(self) -> str:
        """What Serve's controller and replicas have logged, the ends of it."""
        files = sorted(self.folder.glob("0/session_latest/logs/serve/*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    # --------------------------------------------------------------------------------- requests

    def client(self) -> httpx.Client:
        """Of the head's network; make it and use it in one thread, inside `hosts[0].network()`."""
        return httpx.Client(base_url=f"http://127.0.0.1:{HTTP_PORT}", timeout=DEADLINE_S)

    def get(self, path: str) -> httpx.Response:
        with self.hosts[0].network(), self.client() as client:
            return client.get(path)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        with self.hosts[0].network(), self.client() as client:
            return client.post(path, json=body)

    def kvctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `kvctl --address` with the front's address, on the head."""
        return self.kvctl_on_head("--address", f"http://127.0.0.1:{HTTP_PORT}", *words)

    def kvctl_on_head(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `kvctl` for the head's own instances."""
        command = self.hosts[0].command(sys.executable, "-m", "kvelastic.cli", *words)
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def replicas(self) -> list[dict[str, Any]]:
        """What the front reports of them."""
        found: list[dict[str, Any]] = self.get("/kvelastic/replicas").json()["replicas"]
        return found

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()
        for program in self._programs.values():
            program.wait()

    # ------------------------------------------------------------- failures of the second host

    def kill_second(self) -> None:
        """End all that runs on the second host at once."""
        self.hosts[1].kill()
        self._programs[1].wait()

    def replace_second(self) -> None:
        """Start another machine with the address of the second host, which has been killed."""
        subprocess.run(self.hosts[0].command("ip", "link", "del", "wire0"), check=True)
        self.hosts[1] = self._ends.enter_context(Host())
        self._link()
        self._join(1)

    def cut(self) -> None:
        """Take the wire between the hosts away; no connection is closed."""
        subprocess.run(self.hosts[1].command("ip", "link", "set", "wire1", "down"), check=True)

    def heal(self) -> None:
        """Put the wire back."""
        subprocess.run(self.hosts[1].command("ip", "link", "set", "wire1", "up"), check=True)

    def has_left(self) -> bool:
        """Whether Ray on the second host has ended, as it does if the head took it for dead."""
        return self._programs[1].poll() is not None

    def rejoin(self) -> None:
        """Start Ray again on the second host, where it has ended."""
        self._join(1)


class Load:
    """Requests without pause in some threads, until the body ends; what came of each of them."""

    def __init__(self, cluster: RayHosts, body: dict[str, Any], threads: int = 4) -> None:
        self.answers: list[tuple[int, str]] = []
        """Status and text; status 0: an exception, with its text."""
        self._cluster = cluster
        self._body = body
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with self._cluster.hosts[0].network(), self._cluster.client() as client:
            while not self._stops.is_set():
                self.answers.append(self._ask(client))

    def _ask(self, client: httpx.Client) -> tuple[int, str]:
        try:
            answer = client.post("/v1/completions", json=self._body)
        except httpx.HTTPError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    def wait_for_more(self, count: int) -> None:
        """Until so many more requests have ended."""
        before = len(self.answers)
        wait_until(lambda: len(self.answers) >= before + count, "no request ends any more")

    def stop(self) -> list[tuple[int, str]]:
        """End, and return all answers."""
        self._stops.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return self.answers

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
