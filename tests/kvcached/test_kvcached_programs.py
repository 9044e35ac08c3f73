"""The command line of kvcached's own package against an instance of kvelastic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from called_kvctl import kvctl
from client_environments import kvcached_environment
from kvcached_instance import CAPACITY_BYTES, FILE, MIB, NAME, limit_of, values
from processes import run_python
from terminal import Terminal
from waiting import wait_until

from kvelastic.pool.pool import ElasticPool

pytestmark = pytest.mark.matrix  # installs a package
KVCTL = ("-m", "kvcached.cli.kvctl")


@pytest.fixture(scope="module")
def python() -> Path:
    return kvcached_environment()


def test_list_and_limits(pool: ElasticPool, python: Path) -> None:
    def said(*arguments: str) -> str:
        return run_python(*KVCTL, *arguments, python=python).stdout

    assert pool.blocks.alloc(100) is not None

    def agrees() -> bool:
        (ours,) = json.loads(kvctl("list", NAME, "--json").stdout)
        row = {key: ours[key] for key in ("ipc", "limit_bytes", "used_bytes")}
        return json.loads(said("list", "--json")) == [row] and row["used_bytes"] > 0

    wait_until(agrees, "kvcached's list differs from kvelastic's")
    used_bytes = values()[1]
    assert f"{used_bytes / MIB:.2f} MB" in said("list", NAME)

    assert said("limit", NAME, "96M").endswith(f"to 96.00 MB ({96 * MIB} bytes)\n")
    wait_until(lambda: limit_of(pool) == 96 * MIB)
    said("limit-percent", NAME, "12.5")
    wait_until(lambda: limit_of(pool) == CAPACITY_BYTES // 8)
    assert "No enough free space" in said("limit", NAME, str(used_bytes // 2))
    wait_until(lambda: limit_of(pool) == used_bytes // 2)
    assert values()[0] == used_bytes // 2


def test_delete_removes_no_limit(pool: ElasticPool, python: Path) -> None:
    run_python(*KVCTL, "limit", NAME, "96M", python=python)
    wait_until(lambda: limit_of(pool) == 96 * MIB)
    inode = FILE.stat().st_ino
    assert f"Deleted IPC '{NAME}'" in run_python(*KVCTL, "delete", NAME, python=python).stdout
    wait_until(lambda: FILE.exists() and FILE.stat().st_ino != inode, "it is not made again")
    wait_until(lambda: FILE.stat().st_size == 24 and values()[0] == 96 * MIB)
    assert limit_of(pool) == 96 * MIB


@pytest.mark.parametrize("command", ["watch", "kvtop"])
def test_screens_show_a_limit_when_it_changes(
    pool: ElasticPool, python: Path, command: str
) -> None:
    interval = "-n" if command == "watch" else "-r"
    arguments = [str(python), *KVCTL, command, interval, "0.01", NAME]
    assert pool.blocks.alloc(100) is not None
    with Terminal(arguments) as terminal:
        terminal.until(NAME)
        assert kvctl("limit", NAME, "96M", "--wait", "60").exit_code == 0
        terminal.until("96.00 MB")
        if command == "watch":
            terminal.press_ctrl_c()
        else:
            terminal.type("q")
        assert terminal.end() in (0, 130)
