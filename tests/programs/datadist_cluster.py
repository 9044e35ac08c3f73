"""A cluster in a process of its own, which does as it is told, a line at a time.

    with Cluster(2, enable_cache_manager=True) as peer:
        peer.run("cache = manager.allocate_cache(CacheDesc(2, [4, 64], DataType.DT_INT8))")
        peer("cache.cache_id")                       # what an expression comes to, as JSON
        peer.status("manager.pull_cache(CacheKey(1, 7), cache)")      # or the code it fails with

No call gives up on a peer in less than minutes, unless its code or `wait_at_most` says so.

As a program: `datadist_cluster.py`, lines of JSON in and out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import LineProgram

HERE = Path(__file__).parent
MINUTES_MS = 300_000
DEFAULTS: dict[str, Any] = {"device_id": 0, "sync_kv_timeout": MINUTES_MS}


class Cluster(LineProgram):
    """See the module."""

    def __init__(
        self,
        cluster_id: int,
        role: str = "MIX",
        environment: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        super().__init__(__file__, environment={"PYTHONPATH": path} | (environment or {}))
        self.cluster_id = cluster_id
        try:
            self.run(f"config = LLMConfig(); datadist = LLMDataDist(LLMRole.{role}, {cluster_id})")
            for name, value in (DEFAULTS | config).items():
                self.run(f"config.{name} = {value!r}")
            self.run("datadist.init(config.generate_options())")
            kind = "cache_manager" if config.get("enable_cache_manager") else "kv_cache_manager"
            self.run(f"manager = datadist.{kind}")
        except BaseException:
            self.kill()
            raise

    def tell(self, code: str, *, is_expression: bool = False) -> None:
        """Have it begin; `answer` waits for the end."""
        self.send(json.dumps([code, is_expression]))

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.read())
        return answer

    def run(self, code: str) -> None:
        """Statements."""
        self.tell(code)
        answer = self.answer()
        assert "failed" not in answer, answer

    def __call__(self, code: str) -> Any:
        """An expression's value."""
        self.tell(code, is_expression=True)
        answer = self.answer()
        assert "failed" not in answer, answer
        return answer["value"]

    def status(self, code: str) -> str:
        """The code that a call fails with; LLM_SUCCESS where it does not."""
        self.tell(code)
        return self.ended()

    def ended(self) -> str:
        """The same of what it was told."""
        answer = self.answer()
        assert answer.get("status") or "failed" not in answer, answer
        return str(answer.get("status", "LLM_SUCCESS"))

    def kill(self, *, wait: bool = True) -> None:
        """SIGKILL. The files that it leaves in shared memory are removed, as by any reader."""
        from kvelastic.shared import segment_listing

        super().kill(wait=wait)
        segment_listing.reap()

    @contextlib.contextmanager
    def wait_at_most(self, seconds: float) -> Iterator[None]:
        """In the body its calls wait so long for a peer."""
        options = "object.__setattr__(datadist._links._options, 'sync_kv_timeout_s', {})"
        self.run(options.format(seconds))
        yield
        self.run(options.format(MINUTES_MS / 1000))

    def close(self) -> None:
        self.finish()

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    import threading

    from datadist_local import read, write

    import kvelastic.datadist as interface
    from kvelastic.datadist.status import LLMException

    interface.LLMDataDist.link_clusters.__defaults__ = (MINUTES_MS,)
    interface.LLMDataDist.unlink_clusters.__defaults__ = (MINUTES_MS, False)

    class Events(interface.LayerSynchronizer):
        """Layer l may leave when `events[l]` is set; False where it is in `refuse`."""

        def __init__(self, layers: int) -> None:
            self.events = [threading.Event() for _ in range(layers)]
            self.refuse: set[int] = set()

        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            self.events[layer_index].wait()
            return layer_index not in self.refuse

    def cluster(cluster_id: int, port: int, ip: str = "127.0.0.1") -> interface.LLMClusterInfo:
        info = interface.LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(ip, port)
        return info

    names: dict[str, Any] = {name: getattr(interface, name) for name in interface.__all__}
    names |= {
        "cluster": cluster,
        "read": lambda *a: list(read(*a)),
        "write": lambda cache, tensor, offset, data: write(cache, tensor, offset, bytes(data)),
        "Events": Events,
        "threading": threading,
        "ctypes": ctypes,
    }
    for line in sys.stdin:
        code, is_expression = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if is_expression:
                answer["value"] = eval(code, names)
            else:
                exec(code, names)
        except LLMException as error:
            answer = {"failed": str(error), "status": error.status_code.name}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if "datadist" in names:
        names["datadist"].finalize()


if __name__ == "__main__":
    main()
