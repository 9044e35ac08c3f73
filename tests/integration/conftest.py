from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def vllm_is_imported() -> None:
    """So that the first test that needs vLLM takes no longer than the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM warns when it is imported
        import kvelastic.integration.vllm.block_pool  # noqa: F401
