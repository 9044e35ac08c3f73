"""The other side of the benchmark: a node with memory for others to copy.

python owner.py ADDRESS SECRET_FILE BYTES       prints where its memory lies, and its address
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.transfer.memory import mapped
from kvelastic.messages import SecretFile, parse_address
from kvelastic.transfer import Node

if __name__ == "__main__":
    memory = mapped(int(sys.argv[3]), 24 << 10)
    secret = SecretFile(Path(sys.argv[2]))
    with Node(1, listen=[parse_address(sys.argv[1])], secret=secret) as node:
        node.register(memory.address, memory.range_bytes)
        print(memory.address, node.addresses[0], flush=True)
        sys.stdin.read()
