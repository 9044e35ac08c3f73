"""Links between processes, and copies over them of memory whose pages can be unmapped.

    with Node(1, listen=[parse_address("unix:///run/user/1000/kv1")]) as owner:
        owner.register(tensor.data_ptr(), tensor.nbytes)

    with Node(2) as reader:                                     # another process
        link = reader.link(parse_address("unix:///run/user/1000/kv1"), timeout_s=3)
        link.pull([(remote_address, size)], [(local_address, size)], timeout_s=1)
        link.push([(local_address, size)], [(remote_address, size)], timeout_s=1)

**A reader never gets another owner's bytes.** Each copy runs under a lease of the memory's owner.
The lease pins the blocks of the copy until it has finished, for at most `lease_s`. After the copy,
the reader asks the owner whether the lease held throughout and each page still has the same
generation. Otherwise the copy fails with `LeaseLostError`. No process writes into another process:
a push requests that the other side reads.

On one host, the reader's kernel copies directly out of the owner's memory. Between hosts, each copy
uses its own TCP stream, authenticated by a token; its checksum is sent over the link. If the kernel
refuses the direct copy, one host uses a stream too. This package does not import torch and does not
depend on tiers.
"""

from kvelastic.transfer.leases import Hold, Registered, register_blocks, register_pool
from kvelastic.transfer.link import Link
from kvelastic.transfer.node import Node
from kvelastic.transfer.wire import Piece

__all__ = ["Hold", "Link", "Node", "Piece", "Registered", "register_blocks", "register_pool"]
