"""vLLM's scheduler, which also counts the tokens that it has workers compute.

`--scheduler-cls benchmarks.tiers.counting_scheduler.CountingScheduler`; the file that
`COUNTED_TOKENS_FILE` names holds the sum so far. vLLM's own figures count a prompt once, however
often a preempted request computes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class CountingScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = Path(os.environ["COUNTED_TOKENS_FILE"])
        self._counted = 0
        self._file.write_text("0")

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._counted += scheduler_output.total_num_scheduled_tokens
            new = self._file.with_suffix(".new")
            new.write_text(str(self._counted))
            new.replace(self._file)
        return answer
