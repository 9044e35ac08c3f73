from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import LineProgram
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
def start_server(secret_path: Path) -> Iterator[Callable[[str], tuple[LineProgram, Address]]]:
    """Servers that are processes."""
    with ExitStack() as started:

        def start(address: str) -> tuple[LineProgram, Address]:
            program = Path(__file__).with_name("spoken.py")
            process = started.enter_context(LineProgram(program, address, secret_path))
            word, where = process.read().split()
            assert word == "ready"
            return process, parse_address(where)

        yield start
