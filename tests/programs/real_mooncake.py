"""The remote tier over a real `mooncake_master`, which it starts, kills and starts again.

python real_mooncake.py             ends with 0 and "fine" where everything is as it should be
python real_mooncake.py lend PORT   gives the master at that port memory, until its input ends

A process of its own: the client's threads, its log and what it does to its process stay here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port
from processes import LineProgram

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from store_battery import ALL, RECORD_BYTES, WORLD, Bench, Kind, read, records_of, split
from waiting import wait_until

from kvelastic.tiers.stores.mooncake.client import connect
from kvelastic.tiers.stores.mooncake.format import server_key
from kvelastic.tiers.stores.mooncake.store import MooncakeStore

SEGMENT_BYTES = 64 << 20


@contextmanager
def master(port: int) -> Iterator[subprocess.Popen[bytes]]:
    import mooncake

    program = Path(mooncake.__file__).parent / "mooncake_master"
    process = subprocess.Popen(
        [
            program,
            f"-rpc_port={port}",
            "-rpc_address=127.0.0.1",
            f"-metrics_port={free_port()}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: accepts(port), "the master does not listen")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def lender(port: int) -> Iterator[None]:
    """Memory of another process for the master at that port, as other machines give it."""
    with LineProgram(__file__, "lend", str(port), log=Path(os.devnull)) as process:
        assert process.read() == "lent"
        yield


def lend(port: int) -> None:
    client = connect(f"127.0.0.1:{port}", SEGMENT_BYTES, 16 << 20)
    print("lent", flush=True)
    sys.stdin.read()
    client.close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def open_at(port: int) -> MooncakeStore:
    store = MooncakeStore(
        f"127.0.0.1:{port}", RECORD_BYTES, segment_bytes=SEGMENT_BYTES, timeout_s=30.0
    )
    store.enter(WORLD)
    return store


def battery(port: int) -> None:
    """Each case over a store of its own, and the server emptied after it."""
    kind = Kind("mooncake", lambda _: open_at(port), is_bounded=False)
    for case in ALL:
        store = open_at(port)
        try:
            case(Bench(kind, store, Path()))
            store.check_integrity()
            assert store.statistics().errors == 0, store.statistics()
        except BaseException as error:
            if type(error).__name__ != "Skipped":
                print(f"{case.__name__}: {error!r}", file=sys.stderr)
                raise
        finally:
            store.close()


def damaged(port: int) -> None:
    """What another client has written under a key is no record, and the key can be put again."""
    store = open_at(port)
    foreign = connect(f"127.0.0.1:{port}", 0, 16 << 20)
    bench = Bench(Kind("mooncake", lambda _: store), store, Path())
    key = server_key(WORLD.fingerprint, WORLD.key_of((7).to_bytes(8, "little")))
    for contents in (b"x", b"\0" * (RECORD_BYTES + 64), b"\0" * (RECORD_BYTES // 2)):
        assert foreign.put(key, contents) == 0  # type: ignore[attr-defined]
        assert bench.has(7) == [True]
        assert bench.get(7) == [False]
        assert bench.put(7) == [True]
        assert bench.get(7) == [True]
        assert store.erase(WORLD.key_of((7).to_bytes(8, "little"))) == 1
    assert store.statistics().torn == 3
    foreign.close()
    store.close()


def gone(port: int) -> None:
    """A master that is killed and comes back, or was never there."""
    with master(port) as process:
        store = open_at(port)
        keys = b"".join(WORLD.key_of(bytes([n])) for n in range(20))
        assert all(store.put(keys, records_of(keys)))
        assert all(read(store, keys))
        process.kill()
        process.wait()
        assert not any(store.has(keys))
        assert not any(read(store, keys))
        assert not any(store.put(keys, records_of(keys)))
        assert store.statistics().errors > 0
    absent = open_at(port)
    assert not any(absent.has(keys))
    assert not any(absent.put(keys, records_of(keys)))
    with master(port):
        for each in (store, absent):
            finds_it_again(each, keys)
        absent.close()
        store.close()


def finds_it_again(store: MooncakeStore, keys: bytes) -> None:
    wait_until(lambda: all(store.put(keys, records_of(keys))), "it is not found again")
    wait_until(lambda: all(read(store, keys)), "it is not found again")
    assert store.erase(keys) == len(split(keys))


def main() -> None:
    if sys.argv[1:2] == ["lend"]:
        lend(int(sys.argv[2]))
        return
    port = free_port()
    with master(port):
        battery(port)
        damaged(port)
    gone(port)
    print("fine")


if __name__ == "__main__":
    main()
