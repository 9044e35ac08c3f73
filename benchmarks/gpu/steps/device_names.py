"""The name of each device, and of each MIG instance, is the one that nvidia-smi gives it."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from kvelastic import _vmm


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda = DriverCalls()
        count = cuda.get("cuDeviceGetCount", kind=ctypes.c_int)
        drivers = [_vmm.CudaDriver(f"cuda:{i}") for i in range(count)]
        names = [driver.uuid for driver in drivers]
        found.figure("names", names)
        found.check("each device has a name of its own", len(set(names)) == count, ", ".join(names))
        again = [_vmm.CudaDriver(name).ordinal for name in names]
        found.check("and is found by it", again == list(range(count)))
        if cuda.has("kvsim_count") or shutil.which("nvidia-smi") is None:
            found.line("There is no nvidia-smi to compare with.")
            return
        listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
        theirs = re.findall(r"(?:GPU|MIG)-[0-9a-f-]+", listed.stdout)
        found.line(f"nvidia-smi -L: {' '.join(listed.stdout.split())}")
        found.check("nvidia-smi knows each name", set(names) <= set(theirs))


if __name__ == "__main__":
    main()
