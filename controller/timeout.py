"""`timeout`: bounds the time of an await.

    async with timeout(5.0):    # None: no bound
        await something()       # raises asyncio.TimeoutError after 5 s

Not `asyncio.wait_for`: before Python 3.12 it returns the result of an await that completes at the
moment of its cancellation, and the cancellation is lost. Whoever waits for the end of the cancelled
task then waits forever.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
