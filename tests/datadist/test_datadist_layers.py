"""Layer by layer: the order of events is the test, and nothing is timed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.datadist import CacheTask, LayerSynchronizer, LLMException, LLMStatusCode
from kvelastic.datadist.layers import LayerSender

S = LLMStatusCode
MINUTES_MS = int(DEADLINE_S * 1000)


class Steps(LayerSynchronizer):
    """Layer l is computed when `computed[l]` is set; what it answers stands in `says`."""

    def __init__(self, layers: int, log: list[str]) -> None:
        self.computed = [threading.Event() for _ in range(layers)]
        self.asked = [threading.Event() for _ in range(layers)]
        self.says: list[object] = [True] * layers
        self.log = log

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.log.append(f"ask {layer_index} {timeout_in_millis}")
        self.asked[layer_index].set()
        self.computed[layer_index].wait()
        said = self.says[layer_index]
        if isinstance(said, BaseException):
            raise said
        return said  # type: ignore[return-value]


@pytest.fixture
def sender():
    made = LayerSender()
    yield made
    made.end()


def start(
    sender: LayerSender,
    layers: list[range],
    log: list[str],
    push: Callable[[int, int], None] | None = None,
) -> tuple[CacheTask, Steps]:
    steps = Steps(max(one.stop for one in layers), log)

    def record(config: int, layer: int) -> None:
        log.append(f"push {layer} to {config}")
        if push is not None:
            push(config, layer)

    return sender.send(steps, layers, record), steps


def test_layer_is_pushed_after_its_synchronizer_returns(sender):
    log: list[str] = []
    task, steps = start(sender, [range(3)], log)
    steps.asked[0].wait()
    assert log == ["ask 0 None"]
    assert task.synchronize(0) is S.LLM_TIMEOUT
    assert task.get_results(0) == [S.LLM_TIMEOUT]
    steps.computed[0].set()
    steps.asked[1].wait()
    assert log == ["ask 0 None", "push 0 to 0", "ask 1 None"]
    for event in steps.computed:
        event.set()
    assert task.synchronize() is S.LLM_SUCCESS
    assert task.get_results() == [S.LLM_SUCCESS]
    assert log[3:] == ["push 1 to 0", "ask 2 None", "push 2 to 0"]


def test_only_requested_layers_are_synchronized(sender):
    log: list[str] = []
    task, steps = start(sender, [range(1, 3), range(2, 4)], log)
    for event in steps.computed:
        event.set()
    assert task.synchronize() is S.LLM_SUCCESS
    assert [line for line in log if line.startswith("ask")] == [
        f"ask {layer} None" for layer in (1, 2, 3)
    ]
    assert "push 2 to 0" in log
    assert "push 2 to 1" in log
    assert "push 3 to 0" not in log


@pytest.mark.parametrize("said", [False, None, 0, RuntimeError("no"), SystemExit(1)])
def test_false_from_synchronizer_ends_the_task(sender, said):
    log: list[str] = []
    task, steps = start(sender, [range(2), range(1), range(2, 3)], log)
    steps.says[1] = said
    for event in steps.computed:
        event.set()
    assert task.synchronize() is S.LLM_PARAM_INVALID
    # The first was to have layer 1, the second has all of its own, the third was never begun.
    assert task.get_results() == [S.LLM_PARAM_INVALID, S.LLM_SUCCESS, None]
    assert log[-1] == "ask 1 None"


def test_a_failed_push_ends_the_task(sender):
    log: list[str] = []

    def push(config: int, layer: int) -> None:
        if (config, layer) == (1, 1):
            raise LLMException("gone", status_code=S.LLM_LINK_FAILED)

    task, steps = start(sender, [range(3), range(3), range(3)], log, push)
    for event in steps.computed:
        event.set()
    assert task.synchronize() is S.LLM_LINK_FAILED
    assert task.get_results() == [S.LLM_LINK_FAILED] * 3  # begun, and not ended
    assert log[-1] == "push 1 to 1"


def test_tasks_run_independently(sender):
    log: list[str] = []
    first, first_steps = start(sender, [range(1)], log)
    first_steps.asked[0].wait()
    second, second_steps = start(sender, [range(1)], log)
    second_steps.computed[0].set()
    assert second.synchronize(MINUTES_MS) is S.LLM_SUCCESS
    assert first.synchronize(0) is S.LLM_TIMEOUT
    first_steps.computed[0].set()
    assert first.synchronize() is S.LLM_SUCCESS
    wait_until(lambda: not sender._running, "tasks that have ended are kept")


def test_end_cancels_tasks_without_waiting_for_synchronizers(sender):
    log: list[str] = []
    running, steps = start(sender, [range(2)], log)
    other, other_steps = start(sender, [range(1)], log)
    steps.asked[0].wait()
    other_steps.asked[0].wait()
    sender.end()
    for task in (running, other):
        assert task.synchronize() is S.LLM_ENGINE_FINALIZED
    steps.computed[0].set()
    other_steps.computed[0].set()
    late, _ = start(sender, [range(1)], log)
    assert late.synchronize() is S.LLM_ENGINE_FINALIZED
    wait_until(lambda: not sender._running, "threads that have ended are kept")
    assert log == ["ask 0 None"] * 2


def test_arguments_of_a_task():
    task = CacheTask(1)
    with pytest.raises(TypeError):
        task.synchronize("1")
    with pytest.raises(ValueError, match="timeout_in_millis"):
        task.get_results(-1)
