"""Deploys a Serve application into a running Ray, and leaves; for `tests/cluster`.

    .venv-ray/bin/python tests/programs/ray_deploy.py ADDRESS NODE_IP CONFIG.json MODULE:FUNCTION
    .venv-ray/bin/python tests/programs/ray_deploy.py ADDRESS NODE_IP --free
    .venv-ray/bin/python tests/programs/ray_deploy.py ADDRESS NODE_IP --sleep=MODEL

The function makes the application. The second command prints what is left of each node's resources
as JSON, by the node's address. The third puts a replica of a model of Ray Serve LLM to sleep.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import ray
from ray import serve

PORT = 8123


def main(address: str, node: str, what: str, builder: str = "") -> None:
    ray.init(address=address, _node_ip_address=node, log_to_driver=False)
    if what == "--free":
        left = ray._private.state.available_resources_per_node()
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        print(json.dumps({addresses[node_id]: some for node_id, some in left.items()}))
        return
    if what.startswith("--sleep="):
        deployment = f"KvLLMServer:{what.removeprefix('--sleep=')}"
        serve.get_deployment_handle(deployment, "kvelastic").sleep.remote().result()
        return
    serve.start(http_options={"host": "127.0.0.1", "port": PORT, "location": "HeadOnly"})
    module, _, function = builder.partition(":")
    build = getattr(importlib.import_module(module), function)
    application = build(json.loads(Path(what).read_text()))
    serve.run(application, name="kvelastic", route_prefix="/")
    print("deployed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
