"""A machine with simulated GPUs that several processes share, and what it holds, from outside.

    with SimulatedMachine(tmp_path, devices=2, memory_bytes=2 << 30) as machine:
        subprocess.run(..., env=os.environ | machine.environment)
        machine.used_bytes(0)

The driver reads its environment once a process, so a child of its own looks. As a program it is
that child: it reads a device's number a line, or `zero`, and answers with bytes.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

from processes import LineProgram

SIM = Path(__file__).parents[1] / "sim"
SEAMS = Path(__file__).parent / "simulated_gpu"


class SimulatedMachine:
    """A context manager: the machine's file is there while it is active."""

    def __init__(
        self,
        folder: Path,
        *,
        devices: int = 1,
        memory_bytes: int = 1 << 30,
        mig: int = 0,
        **environment: str,
    ) -> None:
        """With `mig`, so many devices each are the MIG instances of one GPU."""
        built = subprocess.run([SIM / "build"], check=True, capture_output=True, text=True)
        self.file = folder / "machine"
        self.environment = {
            "LD_LIBRARY_PATH": built.stdout.strip(),
            "KVSIM_MACHINE": str(self.file),
            "KVSIM_DEVICES": str(devices),
            "KVSIM_MEMORY": str(memory_bytes),
            "KVSIM_MIG": str(mig),
            "KVSIM_POISON": "1",
            "KVSIM_UNREADABLE": "1",
            "KVSIM_LAG": "3",
            # The default follows the driver's prices, and the simulator's own time is none.
            "KVELASTIC_PAGE_SIZE_MB": "2",
            **environment,
        }

    def engine_environment(self) -> dict[str, str]:
        """The same, for a vLLM whose CPU kernels compute on these GPUs."""
        return {**self.readable_environment(), "PYTHONPATH": str(SEAMS)}

    def readable_environment(self) -> dict[str, str]:
        """The same, for kernels that run on the CPU and compute on these GPUs' memory."""
        return {**self.environment, "KVSIM_UNREADABLE": "0"}

    def __enter__(self) -> SimulatedMachine:
        self._looker = LineProgram(__file__, environment=self.environment)
        return self

    def __exit__(self, *_: object) -> None:
        self._looker.kill()
        self.file.unlink(missing_ok=True)

    def used_bytes(self, device: int = 0) -> int:
        """What all processes hold of a device."""
        return int(self._looker.ask(str(device)))

    def zero(self) -> int:
        """Write zeros over what is held of all devices, as no kernel would; answers the bytes."""
        return int(self._looker.ask("zero"))


def _zero(file: str) -> int:
    with Path(file).open("r+b") as machine:
        at = struct.unpack_from("<Q", machine.read(32), 24)[0]  # Header.data_offset
        end, zeroed = machine.seek(0, os.SEEK_END), 0
        while at < end:
            try:
                start = os.lseek(machine.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                break
            at = os.lseek(machine.fileno(), start, os.SEEK_HOLE)
            os.pwrite(machine.fileno(), bytes(at - start), start)
            zeroed += at - start
    return zeroed


def main() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.kvsim_used_bytes.restype = ctypes.c_uint64
    assert driver.cuInit(0) == 0
    for line in sys.stdin:
        question = line.strip()
        if question == "zero":
            answer = _zero(os.environ["KVSIM_MACHINE"])
        else:
            answer = driver.kvsim_used_bytes(int(question))
        print(answer, flush=True)


if __name__ == "__main__":
    main()
