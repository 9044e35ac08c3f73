"""The Ray Serve deployment that receives clients' requests, for all models of an application."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import ray
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvelastic.controller.http.engine_paths import is_anthropic, is_crooked
from kvelastic.controller.http.headers import Headers, find
from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal, unknown_model
from kvelastic.controller.http.request_body import BodyBudget, ClientGoneError, read_body
from kvelastic.controller.routing.body_reader import BodyReader
from kvelastic.controller.routing.model_name import find_name
from kvelastic.errors import ReplicaLostError
from kvelastic.integration.ray.cluster_view import merged_memory, merged_metrics
from kvelastic.integration.ray.dispatch import dispatch
from kvelastic.integration.ray.messages import MODEL, Control, Cut, EngineRequest, Head, Unserved
from kvelastic.integration.ray.prompt_prefix import prefix_of
from kvelastic.integration.ray.settings import ClusterSettings

_log = logging.getLogger("kvelastic.ray")

REPLICA_HEADER: Final = b"x-kvelastic-replica"
TRIED_HEADER: Final = b"x-kvelastic-tried"
_FOR_THE_FRONT: Final = frozenset(
    (b"authorization", b"cookie", b"host", b"origin", b"sec-fetch-site", b"x-api-key")
)
"""The client's headers that only the front evaluates. Replicas trust the front."""
REPLICAS: Final = "/kvelastic/replicas"
_REPORT_S: Final = 5.0
_CHANGE_S: Final = 660.0
"""Longer than any change; the replica's controller enforces the actual timeout."""
_LARGEST_CHANGE: Final = 1 << 20
VIEWS: Final = frozenset(("/memory", "/metrics"))
"""Routes of a controller that the front serves for all nodes."""
CHANGE: Final = re.compile(r"(/memory/|/action/sleep/|/action/wakeup/)([^/]+)(/trim)?")
"""Routes of a controller that the front passes to one replica, named in place of the model."""
_CLIENT_GONE: Final = 499


class KvFront:
    """Reads the model's name in a request, and dispatches it to a replica of that model."""

    def __init__(self, settings: ClusterSettings, models: Mapping[str, Any]) -> None:
        """Take the settings, and the handles of the models' deployments by name."""
        server = settings.front.server
        self._settings = settings
        self._server = server
        self._handles = models
        self._models = {name: handle.options(stream=True) for name, handle in models.items()}
        self._origins = Origins(server)
        self._keys = Keys(settings.auth, self._origins)
        self._budget = BodyBudget(server.max_buffered)
        self._reader = BodyReader()
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

    async def _serve(self, request: Request, path: str, headers: Headers) -> Response:
        if path == "/health":
            return Response()
        self._keys.check_api(headers)
        if path == "/v1/models" and request.method in {"GET", "HEAD"}:
            return JSONResponse({"object": "list", "data": [self._card(m) for m in self._models]})
        if path == REPLICAS and request.method == "GET":
            return JSONResponse({"replicas": await self._at_all(_REPORT_S, "report")})
        if path in VIEWS and request.method == "GET":
            return await self._view(path)
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
                lambda sent: _RayStream(handle.forward.remote(sent)),
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

    async def _view(self, path: str) -> Response:
        """Return the view of all nodes in the form of one controller's response."""
        call = EngineRequest("GET", path)
        nodes, found = await asyncio.gather(
            self._nodes(), self._at_all(_REPORT_S, "control", None, call)
        )
        replies = [one for one in found if isinstance(one, Control) and one.status == 200]
        if path == "/metrics":
            merged = await asyncio.to_thread(merged_metrics, replies, nodes)
            return Response(merged, headers={"content-type": CONTENT_TYPE_LATEST})
        return JSONResponse(merged_memory(replies, nodes))

    async def _nodes(self) -> dict[str, bool]:
        """Return whether each machine is alive, by address. Empty if Ray does not reply in time."""
        try:
            found = await asyncio.wait_for(asyncio.to_thread(ray.nodes), _REPORT_S)
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
            asyncio.ensure_future(self._at(handle, _CHANGE_S, "control", replica, call))
            for handle in self._handles.values()
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
        raise Refusal(
            404, "replica_not_found", f"No replica {replica[:64]!r} runs here; see GET {REPLICAS}."
        )

    async def _at_all(self, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """Call all replicas of all models; return their results, without models that time out."""
        calls = [self._at(each, timeout_s, method, *arguments) for each in self._handles.values()]
        return [one for some in await asyncio.gather(*calls) for one in some]

    async def _at(self, handle: Any, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """Call all replicas of a model; return the results, empty if it times out."""
        call = handle.broadcast(method, *arguments)
        try:
            found = await call.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            return []
        return [one for one in found if not isinstance(one, BaseException) and one is not None]

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began_s, "owned_by": "kvelastic"}

    def __del__(self) -> None:
        """Stop the body reader. Ray calls this when the replica shuts down gracefully."""
        self._reader.stop()


class _RayStream:
    """`dispatch.ReplicaStream` over the generator that Ray's handle returns."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    async def __aiter__(self) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        try:
            async for part in self._generator:
                yield part
        except RayTaskError:
            _log.exception("a replica failed to serve a request")
            raise Refusal(
                500, "internal_error", "The replica failed; its log says where."
            ) from None
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"its replica was lost ({type(error).__name__})") from None

    def cancel(self) -> None:
        self._generator.cancel()


def _response(body: bytes, status: int, headers: Headers) -> Response:
    response = Response(body, status)
    response.raw_headers = [*headers, (b"content-length", b"%d" % len(body))]
    return response


def _of_body(headers: Headers) -> Headers:
    return [header for header in headers if header[0] in {b"content-type", b"retry-after"}]
