"""The Ray Serve deployment that receives clients' requests, for all models of an application."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

import ray
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvelastic import __version__
from kvelastic.controller.api.routes_dashboard import DashboardFiles
from kvelastic.controller.http.engine_paths import is_anthropic, is_crooked
from kvelastic.controller.http.headers import Headers, find
from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal, unknown_model
from kvelastic.controller.http.request_body import BodyBudget, ClientGoneError, read_body
from kvelastic.controller.routing.body_reader import BodyReader
from kvelastic.controller.routing.model_name import find_name
from kvelastic.controller.timeout import timeout
from kvelastic.errors import ReplicaLostError
from kvelastic.integration.ray.cluster_view import NO_REPLY, merged_memory, merged_metrics
from kvelastic.integration.ray.dashboard_view import (
    merged_history,
    merged_links,
    merged_models,
    merged_traffic,
)
from kvelastic.integration.ray.dispatch import dispatch
from kvelastic.integration.ray.messages import MODEL, Control, Cut, EngineRequest, Head, Unserved
from kvelastic.integration.ray.prompt_prefix import prefix_of
from kvelastic.integration.ray.settings import ClusterSettings
from kvelastic.integration.ray.watch import Watch, watch_of

_log = logging.getLogger("kvelastic.ray")

REPLICA_HEADER: Final = b"x-kvelastic-replica"
TRIED_HEADER: Final = b"x-kvelastic-tried"
_FOR_THE_FRONT: Final = frozenset(
    (b"authorization", b"cookie", b"host", b"origin", b"sec-fetch-site", b"x-api-key")
)
"""The client's headers that only the front evaluates. Replicas trust the front."""
REPLICAS: Final = "/kvelastic/replicas"
_REPORT_S: Final = 5.0
_LOOK_S: Final = 0.5
"""How often a view looks whether the replicas that it waits for are silent."""
_CHANGE_S: Final = 660.0
"""Longer than any change; the replica's controller enforces the actual timeout."""
_LARGEST_CHANGE: Final = 1 << 20
VIEWS: Final = frozenset(
    ("/memory", "/metrics", "/models", "/traffic/stats", "/links", "/devices/history")
)
"""Routes of a controller that the front serves for all nodes. The dashboard reads them."""
_MERGES: Final = {
    "/models": merged_models,
    "/traffic/stats": merged_traffic,
    "/links": merged_links,
}
PAGES: Final = "/dashboard/"
CHANGE: Final = re.compile(r"(/memory/|/action/sleep/|/action/wakeup/)([^/]+)(/trim)?")
"""Routes of a controller that the front passes to one replica, named in place of the model."""
_CLIENT_GONE: Final = 499
_MOST_PARTS: Final = 64
"""Parts of a response that the front takes from Ray before the client has read them."""
_numbers: Final = itertools.count(1)


class KvFront:
    """Reads the model's name in a request, and dispatches it to a replica of that model."""

    def __init__(self, settings: ClusterSettings, models: Mapping[str, Any]) -> None:
        """Take the settings, and the handles of the models' deployments by name."""
        server = settings.front.server
        self._settings = settings
        self._server = server
        self._handles = models
        self._models = {name: handle.options(stream=True) for name, handle in models.items()}
        health = settings.health
        self._watches = {name: watch_of(name, health.period, health.silence) for name in models}
        self._origins = Origins(server)
        self._keys = Keys(settings.auth, self._origins)
        self._budget = BodyBudget(server.max_buffered)
        self._reader = BodyReader()
        self._files = DashboardFiles()
        self._began_s = int(time.time())

    async def __call__(self, request: Request) -> Response:
        """Serve one client's request."""
        scope = request.scope
        headers: Headers = scope["headers"]
        preflight = self._origins.preflight(scope) if self._origins.allows_any else None
        if preflight is not None:
            return _response(b"", 204, [*preflight, *self._origins.cors(headers)])
        try:
            response = await self._serve(request, scope["path"], headers)
        except Refusal as refusal:
            is_theirs = is_anthropic(scope["path"])
            body = refusal.anthropic_body(None) if is_theirs else refusal.body()
            response = _response(body, refusal.status, refusal.headers())
        except ClientGoneError:
            response = Response(status_code=_CLIENT_GONE)  # never read
        response.raw_headers += self._origins.cors(headers)
        return response

    def _unlocked(self, request: Request, path: str) -> Response | None:
        """Return the response that needs no key: health, version and the dashboard's files."""
        if path == "/health":
            return Response()
        if request.method not in {"GET", "HEAD"}:
            return None
        if path == "/version":
            return JSONResponse({"version": __version__})
        if path == "/" or path.startswith(PAGES):
            return self._files.answer(request, path.removeprefix(PAGES).strip("/") or "index.html")
        return None

    async def _serve(self, request: Request, path: str, headers: Headers) -> Response:
        unlocked = self._unlocked(request, path)
        if unlocked is not None:
            return unlocked
        self._keys.check_api(headers)
        if path == "/v1/models" and request.method in {"GET", "HEAD"}:
            return JSONResponse({"object": "list", "data": [self._card(m) for m in self._models]})
        if path == REPLICAS and request.method == "GET":
            return JSONResponse({"replicas": await self._replicas()})
        if path in VIEWS and request.method == "GET":
            return await self._view(path, request.scope["query_string"])
        change = CHANGE.fullmatch(path)
        is_setting = change is not None and change[1] == "/memory/" and not change[3]
        if change and request.method == ("PATCH" if is_setting else "POST"):
            return await self._change(request, change, headers)
        if path not in self._keys.model_paths or is_crooked(path):
            raise Refusal(
                404, "not_found", f"There is no {path[:200]} here: docs/cluster.md has the paths."
            )
        return await self._infer(request, path, headers)

    async def _infer(self, request: Request, path: str, headers: Headers) -> Response:
        query: bytes = request.scope["query_string"]
        body = await read_body(
            request.receive,
            find(headers, b"content-length"),
            self._server.max_body,
            self._server.body_timeout,
            self._budget,
        )
        try:
            content_type = find(headers, b"content-type")
            name = (await find_name(body, content_type, query, self._reader)).name
            handle = self._models.get(name)
            if handle is None:
                raise unknown_model(name)
            data = b"".join(body.pieces())
            wanted = EngineRequest(
                request.method,
                path,
                query,
                [header for header in headers if header[0] not in _FOR_THE_FRONT],
                data,
                prefix_of(data),
            )
            answer = await dispatch(
                lambda sent, within_s: _RayStream(handle, self._watches[name], sent, within_s),
                wanted,
                retry_for_s=self._settings.front.retry_for,
            )
        finally:
            body.release()
        response = StreamingResponse(answer.pieces(), answer.head.status)
        response.raw_headers = [
            *answer.head.headers,
            (REPLICA_HEADER, answer.head.replica.encode()),
            (TRIED_HEADER, b"%d" % answer.tried),
        ]
        return response

    async def _view(self, path: str, query: bytes) -> Response:
        """Return the whole cluster's view in the form of one controller's response."""
        call = EngineRequest("GET", path, query)
        nodes, found = await asyncio.gather(
            self._nodes(), self._at_all(_REPORT_S, "control", None, call)
        )
        replies = [one for one in found if isinstance(one, Control) and one.status == 200]
        silent = self._without_reply({reply.replica for reply in replies})
        if path == "/metrics":
            merged = await asyncio.to_thread(merged_metrics, replies, nodes, silent)
            return Response(merged, headers={"content-type": CONTENT_TYPE_LATEST})
        if path == "/memory":
            return JSONResponse(merged_memory(replies, nodes, silent))
        if path == "/devices/history":
            return JSONResponse(await asyncio.to_thread(merged_history, replies))
        return JSONResponse(_MERGES[path](replies))

    async def _replicas(self) -> list[dict[str, Any]]:
        """Return each replica's report, or its last one with the state `no_reply`."""
        found: list[dict[str, Any]] = await self._at_all(_REPORT_S, "report")
        silent = self._without_reply({one["replica"] for one in found})
        return found + [{**one, "state": NO_REPLY} for one in silent]

    def _without_reply(self, replied: set[str]) -> list[dict[str, Any]]:
        """Return the last report, or at least the name, of every other replica that Ray lists."""
        return [
            {"replica": replica, "model": model, **report}
            for model, watch in self._watches.items()
            for replica, report in watch.reports().items()
            if replica not in replied
        ]

    async def _nodes(self) -> dict[str, bool]:
        """Return whether each machine is alive, by address. Empty if Ray does not reply in time."""
        try:
            async with timeout(_REPORT_S):
                found = await asyncio.to_thread(ray.nodes)
        except (RayError, asyncio.TimeoutError):
            return {}
        nodes: dict[str, bool] = {}
        for node in found:  # a machine that came back has two entries
            address = node["NodeManagerAddress"]
            nodes[address] = nodes.get(address, False) or node["Alive"]
        return nodes

    async def _change(self, request: Request, change: re.Match[str], headers: Headers) -> Response:
        """Pass an operator's change to the controller of one replica."""
        key = self._keys.check_admin(headers)
        body = await read_body(
            request.receive, None, _LARGEST_CHANGE, self._server.body_timeout, self._budget
        )
        data = b"".join(body.pieces())
        body.release()
        before, replica, after = change.groups(default="")
        call = EngineRequest(request.method, before + MODEL + after, body=data)
        calls = [
            asyncio.ensure_future(self._at(name, _CHANGE_S, "control", replica, call))
            for name in self._handles
        ]
        try:
            for done in asyncio.as_completed(calls):
                for reply in await done:
                    if isinstance(reply, Control):
                        said = (request.method, change[0], key.id, reply.status)
                        _log.info("%s %s by key %s: %d", *said)
                        return _response(reply.body, reply.status, _of_body(reply.headers))
        finally:
            for each in calls:
                each.cancel()
        if any(replica in self._silent(name) for name in self._handles):
            raise Refusal(503, "replica_lost", f"Replica {replica[:64]!r} does not respond.")
        raise Refusal(
            404, "replica_not_found", f"No replica {replica[:64]!r} runs here; see GET {REPLICAS}."
        )

    async def _at_all(self, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """Call every replica of every model; return the results that arrive in time."""
        calls = [self._at(name, timeout_s, method, *arguments) for name in self._handles]
        return [one for some in await asyncio.gather(*calls) for one in some]

    async def _at(self, name: str, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """Call every replica of a model; return the results that arrive in time.

        Does not wait for a replica that is known to be silent.
        """
        call = self._handles[name].broadcast(method, *arguments)
        try:
            # `results_async` would return no result at all if one replica is silent.
            async with timeout(timeout_s):
                sent = await call._fetch_replica_results_async()
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError):
            return []
        waiting = {asyncio.ensure_future(each.get_async()) for each in sent}
        found: list[Any] = []
        end_s = time.monotonic() + timeout_s
        try:
            while len(waiting) > len(self._silent(name)) and time.monotonic() < end_s:
                done, waiting = await asyncio.wait(
                    waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                found += [each.result() for each in done if _has_result(each)]
        finally:
            for each in waiting:
                each.cancel()
        return [one for one in found if one is not None]

    def _silent(self, name: str) -> frozenset[str]:
        """Return the replicas of a model that Ray lists and that do not respond."""
        watch = self._watches[name]
        return watch.silent() & watch.reports().keys()

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began_s, "owned_by": "kvelastic"}

    def __del__(self) -> None:
        """Stop the body reader. Ray calls this when the replica shuts down gracefully."""
        self._reader.stop()


class _RayStream:
    """`dispatch.ReplicaStream` over the generator that Ray's handle returns.

    It also ends if no replica has accepted the request in time, or the replica has fallen silent.
    """

    def __init__(self, handle: Any, watch: Watch, request: EngineRequest, within_s: float) -> None:
        self._watch = watch
        self._number = next(_numbers)
        self._lost: ReplicaLostError | None = None
        self._has_left = False
        self._has_ended = False
        """The generator has ended; its end may still wait for a place in the queue."""
        self._loop = asyncio.get_running_loop()
        watch.follow(self._number, self._on_lost)
        self._generator = handle.forward.remote(replace(request, number=self._number))
        self._parts: asyncio.Queue[Any] = asyncio.Queue(_MOST_PARTS)
        self._pump = self._loop.create_task(self._take())
        self._expiry = self._loop.call_later(within_s, self._expire, within_s)

    async def __aiter__(self) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        while True:
            part = await self._parts.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                return
            yield part

    def cancel(self) -> None:
        self._has_left = True
        self._watch.leave(self._number)
        self._expiry.cancel()
        self._pump.cancel()
        self._generator.cancel()

    async def _take(self) -> None:
        """Put the generator's parts and its end into the queue."""
        end: Exception | None = None
        try:
            async for part in self._generator:
                await self._parts.put(part)
        except asyncio.CancelledError:  # also raised by Ray if the replica cancelled the call
            if self._has_left:
                raise
            end = self._lost or ReplicaLostError("its replica ended the request")
        except RayTaskError:
            _log.exception("a replica failed to serve a request")
            end = Refusal(500, "internal_error", "The replica failed; its log says where.")
        except (RayError, RayServeException) as error:
            end = ReplicaLostError(f"its replica was lost ({type(error).__name__})")
        except Exception as error:  # the reader raises it
            end = error
        self._has_ended = True
        await self._parts.put(end)

    def _on_lost(self, why: str) -> None:
        """Called by the router's thread."""
        self._loop.call_soon_threadsafe(self._lose, why)

    def _expire(self, within_s: float) -> None:
        if not self._watch.is_accepted(self._number):
            self._lose(f"no replica accepted it within {within_s:.0f} s")

    def _lose(self, why: str) -> None:
        if self._lost is None and not self._has_ended:
            self._lost = ReplicaLostError(why)
            self._pump.cancel()


def _has_result(call: asyncio.Future[Any]) -> bool:
    return not call.cancelled() and call.exception() is None


def _response(body: bytes, status: int, headers: Headers) -> Response:
    response = Response(body, status)
    response.raw_headers = [*headers, (b"content-length", b"%d" % len(body))]
    return response


def _of_body(headers: Headers) -> Headers:
    return [header for header in headers if header[0] in {b"content-type", b"retry-after"}]
