"""HTTP calls to engines: sleep, wake, and state.

An engine is given by its address. `KINDS` has the paths of each kind of engine. Every call has a
deadline. A failed sleep or wake raises `EngineCallError` with the engine's response, shortened.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from kvelastic.controller.timeout import timeout
from kvelastic.errors import EngineCallError, is_out_of_descriptors

_SHOWN_BYTES: Final = 300
_MOST_BYTES: Final = 64 << 10
"""Maximum of a response that is read; the rest is ignored."""


@dataclass(frozen=True)
class Kind:
    """Paths of one kind of engine; None if it lacks the call."""

    sleep: str | None = None
    wake: str | None = None
    is_sleeping: str | None = None
    """If None, the engine's instance reports whether it sleeps."""

    @property
    def can_sleep(self) -> bool:
        """True if this kind of engine can be put to sleep."""
        return self.sleep is not None


KINDS: Final = {
    "vllm": Kind("/sleep?level=1", "/wake_up", "/is_sleeping"),
    "sglang": Kind("/release_memory_occupation", "/resume_memory_occupation"),
    "transformers": Kind(),
    "openai": Kind(),
}


_VLLM_CALLS: Final = frozenset((KINDS["vllm"].sleep, KINDS["vllm"].wake))
NEEDS_DEV_MODE: Final = (
    "vLLM has /sleep and /wake_up only with VLLM_SERVER_DEV_MODE=1 in its environment (launch.env)"
)
"""Cause of a 404 for a path in `_VLLM_CALLS`."""

PORT_CLOSED: Final = (
    "the engine no longer accepts connections: its server is ending, or has lost its engine core"
)
LOOK_AT_PORT_S: Final = 1.0
"""Interval at which the port of an engine is checked during a call."""


class EngineCalls:
    """Calls to engines over one client session. Use it in the event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def sleep(self, kind: Kind, address: str, api_key: str | None, timeout_s: float) -> None:
        """Put one engine to sleep and wait until it sleeps. Raises `EngineCallError`."""
        if kind.sleep is None:
            raise EngineCallError(f"the engine at {address} cannot sleep")
        await self._post(address, kind.sleep, api_key, timeout_s)

    async def wake(self, kind: Kind, address: str, api_key: str | None, timeout_s: float) -> None:
        """Wake one engine and wait until it can serve. Raises `EngineCallError`."""
        if kind.wake is None:
            raise EngineCallError(f"the engine at {address} cannot be woken")
        await self._post(address, kind.wake, api_key, timeout_s)

    async def is_sleeping(
        self, kind: Kind, address: str, api_key: str | None, timeout_s: float
    ) -> bool | None:
        """Return whether one engine sleeps; None if it lacks the call or the call failed."""
        if kind.is_sleeping is None:
            return None
        try:
            async with self._session.get(
                address + kind.is_sleeping,
                headers=_headers(api_key),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                answer = json.loads(await _body_of(response))
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, RecursionError):
            return None
        sleeping = answer.get("is_sleeping") if isinstance(answer, dict) else None
        return sleeping if isinstance(sleeping, bool) else None

    async def is_healthy(
        self, address: str, path: str, api_key: str | None, timeout_s: float
    ) -> bool | None:
        """Return True if one engine's health route returns 200 within `timeout_s`.

        Returns None if this process has no file descriptor left for the call.
        """
        try:
            return await self._status(address + path, api_key, timeout_s) == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            return None if is_out_of_descriptors(error) else False

    async def health_status(
        self, address: str, path: str, api_key: str | None, timeout_s: float
    ) -> int | None:
        """Return the status of one engine's health route; 0 if the connection or response failed.

        Returns None after `timeout_s`, or if this process has no file descriptor left.
        """
        try:
            return await self._status(address + path, api_key, timeout_s)
        except asyncio.TimeoutError:
            return None
        except (aiohttp.ClientError, ValueError) as error:
            return None if is_out_of_descriptors(error) else 0

    async def accepts_connections(self, address: str) -> bool:
        """Return False if one engine's port refuses a connection, so that no process listens.

        Any other failure returns True: the engine may be too busy, or this process out of files.
        """
        url = urlsplit(address)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            async with timeout(LOOK_AT_PORT_S):
                _, writer = await asyncio.open_connection(url.hostname, port)
        except ConnectionRefusedError:
            return False
        except (OSError, asyncio.TimeoutError):
            return True
        writer.close()
        return True

    async def _status(self, url: str, api_key: str | None, timeout_s: float) -> int:
        async with self._session.get(
            url,
            headers=_headers(api_key),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status

    async def _post(self, address: str, path: str, api_key: str | None, timeout_s: float) -> None:
        """Call the engine; end the call if it closes its port.

        A server of vLLM whose engine core was killed during the call waits for the core's answer.
        """
        loop = asyncio.get_running_loop()
        call = loop.create_task(self._call(address, path, api_key, timeout_s))
        closed = loop.create_task(self._until_port_is_closed(address))
        try:
            await asyncio.wait({call, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineCallError(f"{address}{path}: {PORT_CLOSED}")
            call.result()
        finally:
            call.cancel()
            closed.cancel()

    async def _until_port_is_closed(self, address: str) -> None:
        await asyncio.sleep(LOOK_AT_PORT_S)
        while await self.accepts_connections(address):
            await asyncio.sleep(LOOK_AT_PORT_S)

    async def _call(self, address: str, path: str, api_key: str | None, timeout_s: float) -> None:
        try:
            # SGLang requires a JSON body; vLLM accepts any.
            async with self._session.post(
                address + path,
                json={},
                headers=_headers(api_key),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                body = await _body_of(response)
                if response.status != 200:
                    text = body[:_SHOWN_BYTES].decode("utf-8", "replace")
                    is_missing = response.status == 404 and path in _VLLM_CALLS
                    hint = f". {NEEDS_DEV_MODE}" if is_missing else ""
                    raise EngineCallError(
                        f"{address}{path} answered {response.status}: {text!r}{hint}"
                    )
        except asyncio.TimeoutError as error:
            raise EngineCallError(
                f"{address}{path} did not answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineCallError(f"{address}{path}: {error or type(error).__name__}") from error


async def _body_of(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            response.close()
            break
    return bytes(body[:_MOST_BYTES])


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
