"""The access log of a server that a controller looks at."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator

import pytest
from uvicorn.config import LOGGING_CONFIG

from kvelastic.integration.vllm import plugin

LOGGER = logging.getLogger("uvicorn.access")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged, by a server that has set its logging up after the plugin was loaded."""
    before = logging.getLogger("uvicorn").handlers[:], LOGGER.handlers[:], LOGGER.level
    plugin.leave_out_polls()
    plugin.leave_out_polls()
    logging.config.dictConfig(LOGGING_CONFIG)
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    LOGGER.handlers[:] = [Kept()]
    yield said
    logging.getLogger("uvicorn").handlers[:], LOGGER.handlers[:] = before[:2]
    LOGGER.setLevel(before[2])
    LOGGER.filters.clear()


def answered(method: str, path: str, status: int) -> None:
    LOGGER.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", method, path, "1.1", status)


def test_access_log_omits_only_sleep_polls(lines: list[str]) -> None:
    answered("GET", "/is_sleeping", 200)
    answered("GET", "/is_sleeping", 500)
    answered("POST", "/sleep?level=1", 200)
    answered("GET", "/health", 200)
    LOGGER.info("a line of another form: %s", "x")
    LOGGER.info("and one without arguments")
    said = [line.removeprefix("127.0.0.1:1 - ") for line in lines]
    assert said == [
        '"GET /is_sleeping HTTP/1.1" 500',
        '"POST /sleep?level=1 HTTP/1.1" 200',
        '"GET /health HTTP/1.1" 200',
        "a line of another form: x",
        "and one without arguments",
    ]
