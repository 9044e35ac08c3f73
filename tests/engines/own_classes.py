"""A worker and a scheduler as a user of vLLM writes them; each leaves a file when it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker


class OwnWorker(CPUWorker):
    def execute_model(self, scheduler_output: Any) -> Any:
        (Path(os.environ["TEST_OWN_CLASSES"]) / "worker").touch()
        return super().execute_model(scheduler_output)


class OwnScheduler(Scheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        (Path(os.environ["TEST_OWN_CLASSES"]) / "scheduler").touch()
        return super().schedule(*args, **kwargs)
