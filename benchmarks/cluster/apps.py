"""The two applications that are measured; they end with this program.

    .venv-ray/bin/python -m benchmarks.cluster.apps ENGINE_PYTHON PORT      # prints `ready`

/         kvelastic: KvFront, KvRouter and a KvEngine, as `build` makes them
/plain    Ray alone (`plain.py`)
"""

from __future__ import annotations

import sys
import threading

import ray
from ray import serve

from benchmarks.cluster import plain
from kvelastic.integration.ray import app

MODEL = "m"
_ENGINE = "benchmarks.router.engine"


def main(python: str, port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    model = {"name": MODEL, "command": [python, "-m", _ENGINE, "{port}"]}
    more = {"num_cpus": 0.1, "most_requests": plain.REQUESTS}
    serve.run(app.build({"models": [model | more]}), name="kvelastic", route_prefix="/")
    serve.run(plain.build({"models": [model]}), name="plain", route_prefix="/plain")
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
