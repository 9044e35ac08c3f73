"""Subclasses of vLLM's classes, by the names under which vLLM and pickle look them up."""

from __future__ import annotations

import pickle
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.errors import EngineError
from kvelastic.integration.vllm import executor_class, in_engine_core, worker_class
from kvelastic.integration.vllm.connector_settings import OUR_MODULE, name_our_class
from kvelastic.integration.vllm.in_tiers import EngineTiers


class Worker:
    """A user's worker."""

    def __init__(self) -> None:
        self.calls = ["made"]
        self.model_runner = SimpleNamespace(block_tables=None)

    def compile_or_warm_up_model(self) -> int:
        self.calls.append("warmed up")
        return 7


def resolve(path: str) -> type:
    """As vLLM's `resolve_obj_by_qualname` does."""
    module, name = path.rsplit(".", 1)
    found: type = getattr(import_module(module), name)
    return found


def test_worker_of_the_user_is_subclassed() -> None:
    path = worker_class.path(f"{__name__}.Worker")
    assert worker_class.path(path) == path
    found = resolve(path)
    assert issubclass(found, Worker)
    assert resolve(path) is found
    worker = found()
    assert worker.compile_or_warm_up_model() == 7
    assert worker.calls == ["made", "warmed up"]


def test_subclass_is_unpickled_by_name() -> None:
    made = executor_class.get_class(lambda _: Worker, None)
    assert issubclass(made, Worker)
    assert executor_class.get_class(lambda _: made, None) is made
    name = made.__qualname__
    sent = pickle.dumps(made)
    executor_class._subclasses._made.clear()  # as in another process
    assert pickle.loads(sent).__qualname__ == name


def test_missing_worker_is_named_in_the_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        resolve(worker_class.path("no_such_module.Worker"))
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        resolve(worker_class.path(f"{__name__}.Missing"))
    with pytest.raises(AttributeError, match="missing"):
        _ = worker_class.missing


def test_offloading_inside_a_multi_connector_is_ours() -> None:
    offloading: dict[str, object] = {"kv_connector": "OffloadingConnector"}
    other: dict[str, object] = {"kv_connector": "ExampleConnector"}
    configured = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": [offloading, other]},
    )
    name_our_class(configured)
    assert configured.kv_connector_module_path is None
    assert offloading["kv_connector_module_path"] == OUR_MODULE
    assert "kv_connector_module_path" not in other


def test_executor_chosen_before_kvelastic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_engine_core, "_has_executor", False)
    with pytest.raises(EngineError, match="load_general_plugins"):
        in_engine_core.make_block_pool(SimpleNamespace, 8)


def test_worker_calls_that_change_weights_end_the_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Chosen:
        """vLLM's executor."""

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[object]:
            return [method]

    class Executor(executor_class.ElasticExecutor, Chosen):
        def __init__(self, instance: Any) -> None:
            self.kvelastic_instance = instance

    ended: list[bool] = []
    monkeypatch.setattr(EngineTiers, "end_generation", lambda _: ended.append(True))
    tiers: Any = object.__new__(EngineTiers)
    tiers._peers = None
    executor: Any = Executor(SimpleNamespace(tiers=tiers))
    for method in ("execute_model", "supports_draft_weight_updates", "wake_up"):
        assert executor.collective_rpc(method) == [method]
    executor._on_each_worker(len)
    assert ended == []
    executor.collective_rpc("reload_weights")
    executor.collective_rpc(len)
    assert ended == [True, True]
