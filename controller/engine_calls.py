"""How each kind of engine is put to sleep, woken and asked how it is, over HTTP.

An engine is an address; which calls it takes is a row of `KINDS`. Every call has a deadline and
raises `EngineCallError` with what the engine answered, shortened.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final

import aiohttp

from kvelastic.errors import EngineCallError, is_out_of_descriptors

_SHOWN_BYTES: Final = 300
_MOST_BYTES: Final = 64 << 10
"""Of an answer; nothing is read beyond it."""


@dataclass(frozen=True)
class Kind:
    """Paths of one kind of engine; None: it has no such call."""

    sleep: str | None = None
    wake: str | None = None
    is_sleeping: str | None = None
    """Without it the engine's instance says whether it sleeps."""

    @property
    def can_sleep(self) -> bool:
        """Whether it can be put to sleep."""
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
"""What an engine's 404 to one of these means."""


class EngineCalls:
    """Calls over one client session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def sleep(self, kind: Kind, address: str, api_key: str | None, timeout_s: float) -> None:
        """Put one engine to sleep; returns when it sleeps."""
        if kind.sleep is None:
            raise EngineCallError(f"the engine at {address} cannot sleep")
        await self._post(address, kind.sleep, api_key, timeout_s)

    async def wake(self, kind: Kind, address: str, api_key: str | None, timeout_s: float) -> None:
        """Wake one engine; returns when it can serve."""
        if kind.wake is None:
            raise EngineCallError(f"the engine at {address} cannot be woken")
        await self._post(address, kind.wake, api_key, timeout_s)

    async def is_sleeping(
        self, kind: Kind, address: str, api_key: str | None, timeout_s: float
    ) -> bool | None:
        """Whether one engine sleeps; None if it has no such call or did not say."""
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
        """Whether one engine answers 200 on its health route in time.

        None: it could not be asked, for this process has no file descriptor left.
        """
        try:
            return await self._status(address + path, api_key, timeout_s) == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            return None if is_out_of_descriptors(error) else False

    async def health_status(
        self, address: str, path: str, api_key: str | None, timeout_s: float
    ) -> int | None:
        """The status that one engine's health route returns; 0 if it takes no connection.

        None: it did not return one in time, or could not be asked.
        """
        try:
            return await self._status(address + path, api_key, timeout_s)
        except asyncio.TimeoutError:
            return None
        except (aiohttp.ClientError, ValueError) as error:
            return None if is_out_of_descriptors(error) else 0

    async def _status(self, url: str, api_key: str | None, timeout_s: float) -> int:
        async with self._session.get(
            url,
            headers=_headers(api_key),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status

    async def _post(self, address: str, path: str, api_key: str | None, timeout_s: float) -> None:
        try:
            # SGLang wants a JSON body, vLLM takes none or any.
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
