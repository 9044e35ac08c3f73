from __future__ import annotations

import warnings
from collections.abc import Iterator

import elastic_pools
import pytest


@pytest.fixture(scope="session")
def vllm_is_imported() -> None:
    """So that the first test that needs vLLM takes no longer than the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM warns when it is imported
        import kvelastic.integration.vllm.block_pool  # noqa: F401


@pytest.fixture(autouse=True)
def _pools_end_with_their_test() -> Iterator[None]:
    yield
    elastic_pools.close_all()
