"""Links between processes, and copies over them of memory whose pages come and go.

    with Node(1, listen=[parse_address("unix:///run/user/1000/kv1")]) as owner:
        owner.register(tensor.data_ptr(), tensor.nbytes)

    with Node(2) as reader:                                     # another process
        link = reader.link(parse_address("unix:///run/user/1000/kv1"), timeout_s=3)
        link.pull([(remote_address, size)], [(local_address, size)], timeout_s=1)
        link.push([(local_address, size)], [(remote_address, size)], timeout_s=1)

**A reader never gets another owner's bytes.** Each copy stands under a lease of the memory's owner:
the blocks that it touches are pinned until the copy is over, and not longer than `lease_s`. When
the bytes are there the reader asks the owner whether the lease still held and each page is of the
generation that it had; only a yes makes the copy good (`LeaseLostError` otherwise). Nobody ever
writes into another process: a push asks the other side to read.

On one host the reader's kernel copies out of the owner's memory, with no step between. Between
hosts bytes go over a TCP stream of their own, with a token for each and a checksum that comes over
the link; where the kernel does not allow the first, the same stream is used on one host too.
Imports no torch, and knows no tiers.
"""

from kvelastic.transfer.link import Link
from kvelastic.transfer.node import Node
from kvelastic.transfer.pieces import Piece
from kvelastic.transfer.pool_memory import register_blocks, register_pool
from kvelastic.transfer.ranges import Hold, Registered

__all__ = ["Hold", "Link", "Node", "Piece", "Registered", "register_blocks", "register_pool"]
