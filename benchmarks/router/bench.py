"""The controller beside a bare proxy: requests and streams a second, time to first byte.

python benchmarks/router/bench.py [--seconds 4] [--rounds 3] [--clients 32]
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

PROGRAMS = str(Path(__file__).parent / "programs.py")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens on port {port}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    arguments = parser.parse_args()
    ports = {name: free_port() for name in ("engine", "bare", "controller")}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        json.dump(
            {
                "server": {"port": ports["controller"]},
                "models": [{"name": "m", "url": f"http://127.0.0.1:{ports['engine']}"}],
            },
            config,
        )
        config.flush()
        commands = [
            [PROGRAMS, "engine", str(ports["engine"])],
            [PROGRAMS, "bare", str(ports["bare"]), str(ports["engine"])],
            ["-m", "kvelastic.controller", "--config", config.name],
        ]
        running = [
            subprocess.Popen(
                [sys.executable, *c], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for c in commands
        ]
        try:
            for port in ports.values():
                wait_for(port)
            measure(ports, arguments)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)


def measure(ports: dict[str, int], arguments: argparse.Namespace) -> None:
    print(f"{arguments.clients} clients, median of {arguments.rounds} rounds")
    print(f"{'':24}{'a second':>10}{'p50 ms':>9}{'p99 ms':>9}   of bare")
    for kind in ("plain", "stream"):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for _ in range(arguments.rounds):  # in turns, for the machine is not always as fast
            for name, port in ports.items():
                out = subprocess.run(
                    [sys.executable, PROGRAMS, "load", str(port), str(arguments.seconds),
                     str(arguments.clients), kind],
                    capture_output=True, text=True, check=True, timeout=120,
                ).stdout  # fmt: skip
                found[name].append(json.loads(out))
        bare_per_s = median(row["per_s"] for row in found["bare"])
        for name, rows in found.items():
            per_s, p50, p99 = (median(r[k] for r in rows) for k in ("per_s", "p50_ms", "p99_ms"))
            print(f"{kind:8}{name:16}{per_s:10.0f}{p50:9.2f}{p99:9.2f}{per_s / bare_per_s:10.2f}")


if __name__ == "__main__":
    main()
