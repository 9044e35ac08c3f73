"""Servers that kvelastic's plugin refuses end with the reason."""

from __future__ import annotations

from pathlib import Path

from vllm_server import VllmServer
from waiting import DEADLINE_S


def refused_start(server: VllmServer) -> str:
    """Wait until the server has failed and return what it printed."""
    with server:
        status = server.process.wait(DEADLINE_S)
    assert status != 0
    return server.log.read_text(errors="replace")


def test_unknown_vllm_version_refuses_the_start(
    tiny_model: Path, log_folder: Path, tmp_path: Path
) -> None:
    # Python runs this at its start, in every process: the plugin finds another table then.
    tmp_path.joinpath("sitecustomize.py").write_text(
        "from kvelastic import engines\n"
        "engines.ENGINES = (engines.Engine('vllm', 'vLLM', tried=('0.31',)),)\n"
    )
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_STRICT": "true",
        "PYTHONPATH": str(tmp_path),
    }
    text = refused_start(VllmServer(tiny_model, log_folder / "version.log", environment))
    assert "kvelastic does not know vLLM 0.32" in text
    assert "tried with vLLM 0.31.x" in text
    assert "unset KVELASTIC_STRICT" in text


def test_invalid_variable_refuses_the_start(tiny_model: Path, log_folder: Path) -> None:
    environment = {"ENABLE_KVELASTIC": "true", "KVELASTIC_PAGE_SIZE_MB": "3"}
    text = refused_start(VllmServer(tiny_model, log_folder / "variable.log", environment))
    assert "KVELASTIC_PAGE_SIZE_MB='3' is not accepted" in text
