"""A cluster in a process of its own, which does as it is told, a line at a time.

    with Cluster(2, enable_cache_manager=True) as peer:
        peer.run("cache = manager.allocate_cache(CacheDesc(2, [4, 64], DataType.DT_INT8))")
        peer("cache.cache_id")                       # what an expression comes to, as JSON
        peer.status("manager.pull_cache(CacheKey(1, 7), cache)")      # or the code it fails with

As a program: `datadist_cluster.py`, lines of JSON in and out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Cluster:
    """See the module."""

    def __init__(
        self,
        cluster_id: int,
        role: str = "MIX",
        environment: dict[str, str] | None = None,
        **config: object,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
                **(environment or {}),
            },
        )
        self.cluster_id = cluster_id
        try:
            self.run(f"config = LLMConfig(); datadist = LLMDataDist(LLMRole.{role}, {cluster_id})")
            for name, value in ({"device_id": 0} | config).items():
                self.run(f"config.{name} = {value!r}")
            self.run("datadist.init(config.generate_options())")
            kind = "cache_manager" if config.get("enable_cache_manager") else "kv_cache_manager"
            self.run(f"manager = datadist.{kind}")
        except BaseException:
            self.close()
            raise

    def tell(self, code: str, *, is_expression: bool = False) -> None:
        """Have it begin; `answer` waits for the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([code, is_expression]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"cluster {self.cluster_id} has died"
        return json.loads(line)

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
        return answer.get("status", "LLM_SUCCESS")

    def stop(self) -> None:
        """With SIGSTOP; it has stopped when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """With SIGKILL; what it leaves in shared memory is removed, as whoever looks would."""
        from kvelastic import segment_dir

        self.process.kill()
        self.process.wait()
        segment_dir.reap()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.wait(30)
        self.process.stdout.close()  # type: ignore[union-attr]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    import threading

    from datadist_local import read, write

    import kvelastic.datadist as interface
    from kvelastic.datadist.status import LLMException

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
