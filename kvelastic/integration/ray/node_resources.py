"""Prints the resources that a node adds to the cluster, for `ray start`:

    R=$(python -m kvelastic.integration.ray.node_resources)
    ray start --address=HEAD:6379 --resources="$R"

Ray's resources are constant while a node runs. So this is the capacity of the node's ledgers, not
their free memory. It is the sum over all GPUs, or the host without a GPU. Existing ledgers count
with their current capacity.
"""

from __future__ import annotations

import json
import sys

from kvelastic import config
from kvelastic.device import machine
from kvelastic.device.machine import DeviceFacts
from kvelastic.errors import KvelasticError
from kvelastic.integration.ray.settings import RESOURCE
from kvelastic.shared import ledger
from kvelastic.shared.ledger_facts import LedgerInfo
from kvelastic.units import MIB_BYTES


def capacity_bytes(found: tuple[DeviceFacts, ...], ledgers: list[LedgerInfo], group: str) -> int:
    """Return the memory that instances of a group can hold on these devices together."""
    shared = {
        machine.device_key(info.device): info.capacity_bytes
        for info in ledgers
        if info.status == "readable" and info.group == group
    }
    gpus = [device for device in found if device.kind != "host" and device.total_bytes]
    parents = {device.parent for device in gpus}
    used = [gpu for gpu in gpus if gpu.uuid not in parents] or list(found)
    return sum(
        shared.get(device.key) or device.capacity_bytes or device.total_bytes or 0
        for device in used
    )


def main() -> int:
    """Print the resources as JSON; return the exit code."""
    try:
        settings = config.load()
        found = machine.list_devices(settings.host_memory_bytes)
        capacity = capacity_bytes(found.devices, ledger.list_ledgers(), settings.ledger)
    except KvelasticError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({RESOURCE: capacity // MIB_BYTES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
