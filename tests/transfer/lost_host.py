"""A node that is one of two hosts, each a network namespace.

python lost_host.py owner|reader FOLDER     the reader cuts its cable when it reads a line
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from linked import secret_file

from kvelastic.messages import parse_address
from kvelastic.transfer import Link, Node

secret = secret_file(Path(sys.argv[2]))
address = parse_address("tcp://10.77.0.1:7701")
if sys.argv[1] == "owner":
    with Node(1, listen=[address], secret=secret, allowed=["10.77.0.0/24"]):
        print("ready", flush=True)
        sys.stdin.read()
else:
    ended: list[Link] = []
    gone = threading.Event()

    def see(link: Link) -> None:
        ended.append(link)
        gone.set()

    with Node(2, secret=secret, on_end=see) as node:
        link = node.link(address, timeout_s=300)
        link.check(300)
        print("linked", flush=True)
        sys.stdin.readline()
        subprocess.run(["ip", "link", "set", "wire1", "down"], check=True)
        print("noticed" if gone.wait(300) else "not noticed", ended[0].ended, flush=True)
