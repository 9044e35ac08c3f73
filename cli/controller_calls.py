"""Calls the controller at an address, for `kvctl --address`.

    there = RemoteController("http://10.0.0.2:8080")
    there.rows(())                                      # rows of `kvctl list --json`
    there.request("chat", Request(limit_bytes=1 << 30), wait_s=5.0)
    there.set_asleep("chat", True)

The HTTP front of a cluster (docs/cluster.md) has the same routes. `name` is the instance's model at
the controller (in a cluster: its replica) or the instance's own name. All calls block. They end the
command with an error (`fail`) if the controller cannot be reached, refuses the call, returns an
unknown response, or sends nothing for the operation's own time and another `_ANSWER_S`.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote, urlsplit

import msgspec

from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.errors import InvalidArgumentError
from kvelastic.instance.outcome import Outcome, Verdict
from kvelastic.instance.row import Row
from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.shared.segment import Ack

if TYPE_CHECKING:
    from kvelastic.shared.segment import Request

KEY_VARIABLE: Final = "KVELASTIC_CONTROLLER_KEY"
"""Variable with the controller's key. Other users could see a key in the arguments."""
_PORTS: Final = {"http": 80, "https": 443}
_ANSWER_S: Final = 30.0
_SLEEP_S: Final = 600.0
"""Time for an engine's sleep or wake; the controller enforces the configured timeout."""
_LARGEST_ANSWER: Final = 64 << 20


class RemoteRow(Row, total=False):
    """A row of `GET /memory` from a controller or a cluster's front."""

    node: str
    """The instance's machine. Only a cluster's front reports it."""


class _Memory(msgspec.Struct):
    models: dict[str, RemoteRow | None]
    instances: list[RemoteRow]


class _Change(msgspec.Struct):
    answer: dict[str, Any]


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


class _Slept(msgspec.Struct):
    success: bool
    message: str


class RemoteController:
    """The controller at an address. Each call sends the key in `KVELASTIC_CONTROLLER_KEY`."""

    def __init__(self, address: str) -> None:
        """`address` is `http://HOST:PORT` or `https://HOST:PORT`. Does not connect.

        Raises `InvalidArgumentError` for any other form of address.
        """
        self.address = address.rstrip("/")
        not_accepted = InvalidArgumentError(
            f"the address {address!r} is not accepted; write http://HOST:PORT or https://HOST:PORT"
        )
        try:
            parts = urlsplit(self.address)
            port = parts.port
        except ValueError:
            raise not_accepted from None
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
        host = parts.hostname or ""
        is_host = host.isprintable() and host != "" and " " not in host
        if parts.scheme not in _PORTS or not is_host or not is_plain:
            raise not_accepted
        self._parts = parts
        self._host = host
        self._port = _PORTS[parts.scheme] if port is None else port

    def rows(self, names: tuple[str, ...]) -> list[RemoteRow]:
        """Return the rows of the named instances, or of every instance if `names` is empty."""
        memory = self._memory()
        if not names:
            return memory.instances
        found = [self._row(memory, name) for name in names]
        for name, row in zip(names, found, strict=True):
            if row is None:
                self._fail_unknown(memory, name)
        return [row for row in found if row is not None]

    def request(self, name: str, request: Request, wait_s: float | None) -> tuple[Outcome, Ack]:
        """Send a request to an instance, and return its outcome and acknowledgement.

        The controller waits up to `wait_s` for the outcome; None means its default.
        """
        body: dict[str, Any] = {} if wait_s is None else {"wait": wait_s}
        path = f"/memory/{quote(self._model(name), safe='')}"
        if request.trim:
            found = self._call("POST", path + "/trim", body, wait_s or 0.0)
        else:
            limit_bytes = request.limit_bytes
            if limit_bytes is not None:
                body["limit"] = None if limit_bytes == UNLIMITED_BYTES else limit_bytes
            if request.min_bytes is not None:
                body["min"] = request.min_bytes
            if request.priority is not None:
                body["priority"] = request.priority
            found = self._call("PATCH", path, body, wait_s or 0.0)
        facts = self._read(found, _Change).answer
        # The controller reports a verdict in place of the acknowledgement's state.
        answer = self._convert({**facts, "acknowledged_ns": 0}, Ack)
        try:
            verdict = Verdict(answer.state)
        except ValueError:
            self._fail_unreadable(f"the state {answer.state!r}")
        beyond_bytes = self._convert(facts.get("beyond_device_bytes", 0), int)
        return Outcome(verdict, answer.reason, beyond_bytes), answer

    def set_asleep(self, name: str, asleep: bool) -> tuple[bool, str]:
        """Put a model and its engine to sleep, or wake them. Return the success and a message."""
        action = "sleep" if asleep else "wakeup"
        path = f"/action/{action}/{quote(self._model(name), safe='')}"
        slept = self._read(self._call("POST", path, {}, _SLEEP_S, takes_refusal=True), _Slept)
        return slept.success, slept.message

    # ------------------------------------------------------------------------------- names

    def _memory(self) -> _Memory:
        found: _Memory = self._read(self._call("GET", "/memory", None, 0.0), _Memory)
        return found

    def _row(self, memory: _Memory, name: str) -> RemoteRow | None:
        by_name = {row["name"]: row for row in memory.instances}
        return by_name.get(name) or memory.models.get(name)

    def _model(self, name: str) -> str:
        """Return the model at the controller for the name of a model or an instance."""
        memory = self._memory()
        if name in memory.models:
            return name
        for model, row in memory.models.items():
            if row is not None and row["name"] == name:
                return model
        if any(row["name"] == name for row in memory.instances):
            fail(
                f"{name!r} runs at {self.address} and belongs to no model of that controller; use"
                " kvctl on its machine."
            )
        return self._fail_unknown(memory, name)

    def _fail_unknown(self, memory: _Memory, name: str) -> NoReturn:
        known = sorted({*memory.models, *(row["name"] for row in memory.instances)})
        names = f"Known names: {', '.join(known)}." if known else "There are none."
        fail(f"no model or instance at {self.address} is called {name!r}. {names}")

    # -------------------------------------------------------------------------------- HTTP

    def _call(
        self, method: str, path: str, body: object, takes_s: float, *, takes_refusal: bool = False
    ) -> bytes:
        """Return the body of the response. Ends the command on an error.

        Never follows a redirect, so no other server gets the key. With `takes_refusal`, a refusal
        with `success` and `message` is returned too.
        """
        parts = self._parts
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(self._host, self._port, timeout=takes_s + _ANSWER_S)
        headers = {"accept": "application/json"}
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            fail(f"{KEY_VARIABLE} has characters that no key has.")  # must not print the key
        if key:
            headers["authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = json.dumps(body).encode()
        try:
            connection.request(method, parts.path + path, data, headers)
            response = connection.getresponse()
            text = response.read(_LARGEST_ANSWER + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            fail(f"{self.address} cannot be reached: {error or type(error).__name__}.")
        finally:
            connection.close()
        if len(text) > _LARGEST_ANSWER:
            self._fail_unreadable(f"more than {_LARGEST_ANSWER} bytes")
        # A 409 contains the outcome of a refused change.
        if response.status < 300 or (takes_refusal and b'"success"' in text) or b'"answer"' in text:
            return text
        return self._fail_refused(response.status, text)

    def _fail_refused(self, status: int, text: bytes) -> NoReturn:
        try:
            why = msgspec.json.decode(text, type=_Refusal).error.message
        except (msgspec.DecodeError, RecursionError):
            why = "its response has no message; is a kvelastic-controller listening there?"
        advice = ""
        if status in {401, 403}:
            advice = (
                f" {KEY_VARIABLE} has {'another' if os.environ.get(KEY_VARIABLE) else 'no'} key."
            )
        fail(f"{self.address} refuses it ({status}): {why}{advice}")

    def _read(self, text: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            self._fail_unreadable(str(error))

    def _convert(self, value: object, kind: Any) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            self._fail_unreadable(str(error))

    def _fail_unreadable(self, what: str) -> NoReturn:
        fail(
            f"{self.address} returned something that this kvctl cannot read ({what}); compare the"
            " versions: GET /version there, and `kvctl version`."
        )
