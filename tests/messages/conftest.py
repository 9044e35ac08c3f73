from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spoken import PROTOCOL, SECRET, answer

from kvelastic.messages import Address, Endpoint, SecretFile, parse_address


@pytest.fixture
def secret_path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path, secret_path: Path) -> Iterator[Endpoint]:
    """An endpoint of this process that listens."""
    address = f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"
    with Endpoint(
        PROTOCOL, answer, listen=[parse_address(address)], secret=SecretFile(secret_path)
    ) as endpoint:
        yield endpoint


@pytest.fixture
def client(secret_path: Path) -> Iterator[Endpoint]:
    """An endpoint of this process that only connects."""
    with Endpoint(PROTOCOL, answer, secret=SecretFile(secret_path)) as endpoint:
        yield endpoint


@pytest.fixture
def start_server(
    secret_path: Path,
) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Address]]]:
    """Servers that are processes."""
    started: list[subprocess.Popen[str]] = []

    def start(address: str) -> tuple[subprocess.Popen[str], Address]:
        program = Path(__file__).with_name("spoken.py")
        process = subprocess.Popen(
            [sys.executable, str(program), address, str(secret_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(program.parent)},
        )
        started.append(process)
        assert process.stdout is not None
        word, _, where = process.stdout.readline().strip().partition(" ")
        assert word == "ready"
        return process, parse_address(where)

    yield start
    for process in started:
        process.kill()
        process.communicate()
