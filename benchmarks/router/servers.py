"""The three that are measured, as processes: the engine, the bare proxy, the controller."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    """One of them."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Time of cores that it has taken since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def running(log_requests: bool = True) -> Iterator[dict[str, Server]]:
    """`engine`, `bare`, `controller`, ready to be asked; the last two are in front of the first."""
    ports = {name: free_port() for name in ("engine", "bare", "controller")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "controller.yaml"
        config.write_text(
            json.dumps(
                {
                    "server": {"port": ports["controller"], "log_requests": log_requests},
                    "models": [
                        {
                            "name": "m",
                            "aliases": ["an-alias"],
                            "url": f"http://127.0.0.1:{ports['engine']}",
                        }
                    ],
                }
            )
        )
        own = "benchmarks.router."
        commands = {
            "engine": [own + "engine", str(ports["engine"])],
            "bare": [own + "bare", str(ports["bare"]), str(ports["engine"])],
            "controller": ["kvelastic.controller", "--config", str(config)],
        }
        servers: dict[str, Server] = {}
        for name, command in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=log
            )
            stack.callback(_end, process)
            servers[name] = Server(ports[name], process)
            _wait_for(name, servers[name])
        yield servers


def load(server: Server, plan: dict[str, Any]) -> dict[str, float]:
    """Put it under load; what the load saw, and the server's CPU time of an answer.

    A plan names the `program` of this folder that is the load, if not `load`.
    """
    before_s = server.cpu_s()
    program = "benchmarks.router." + plan.get("program", "load")
    done = subprocess.run(
        [sys.executable, "-m", program, str(server.port), json.dumps(plan)],
        cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=plan["seconds"] + 120,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    found["cpu_us"] = (server.cpu_s() - before_s) * 1e6 / found["answers"]
    return found


def _wait_for(name: str, server: Server) -> None:
    end_s = time.monotonic() + START_S
    while server.process.poll() is None and time.monotonic() < end_s:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", server.port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"the {name} does not listen on port {server.port}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
