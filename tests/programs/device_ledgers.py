"""Devices of a test's own: ledgers with nothing behind them, for instances on several devices.

machine = Machine({"a": 8, "b": 8})       # pages of 2 MiB
mine = machine.join("aab")                # two ranks on a, one on b
mine.device_set.grant(2); machine.granted("a"); machine.check(); machine.close()
"""

from __future__ import annotations

import mmap
import os
import random

from native_pools import HUGE

from kvelastic import _vmm
from kvelastic.device.selection import Device
from kvelastic.shared import ledger
from kvelastic.shared.device_set import JoinedDevices, join_all


class Machine:
    """Devices of this test's own, with ledgers and nothing behind them."""

    def __init__(self, pages: dict[str, int]) -> None:
        self.group = f"kvdeviceset-{os.getpid()}-{random.randrange(1 << 40):x}"
        self.devices = {
            name: Device(name, count * HUGE, _vmm.HostDriver) for name, count in pages.items()
        }
        self.joined: list[JoinedDevices] = []

    def join(self, ranks: str, name: str = "", **options: object) -> JoinedDevices:
        """`ranks` are the devices' names, a letter each: "aab" has two copies on a."""
        name = name or f"m{len(self.joined)}"
        made = join_all(
            [self.devices[rank] for rank in ranks],
            group=self.group,
            name=name,
            copy_bytes=HUGE,
            **({"uuid": name.encode().ljust(16)} | options),  # type: ignore[arg-type]
        )
        self.joined.append(made)
        return made

    def members(self, device: str) -> dict[str, ledger.Member]:
        return {
            member.name: member
            for info in ledger.list_ledgers()
            if (info.group, info.device) == (self.group, device)
            for member in info.members
        }

    def granted(self, device: str) -> dict[str, int]:
        """Pages that each member has been granted there."""
        members = self.members(device)
        return {name: member.granted_bytes // HUGE for name, member in members.items()}

    def check(self) -> None:
        """Nobody has been granted or promised more than there is, on any device."""
        for name in self.devices:
            path = ledger.ledger_path(self.group, name)
            if not path.exists():
                continue
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
            ):
                _vmm.ledger_check_integrity(memory)

    def close(self) -> None:
        for one in self.joined:
            one.close()
        left = [name for name in self.devices if ledger.ledger_path(self.group, name).exists()]
        assert not left
