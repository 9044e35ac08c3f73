"""Host and Origin where no key is asked for, and pages of elsewhere that are allowed by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from running import Controller, Engine, config_for

from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.settings.settings import ServerSettings
from kvelastic.controller.settings.settings_file import parse
from kvelastic.errors import ControllerConfigError

PAGE, APP = "http://localhost:3000", "app://obsidian.md"


def code_of(*headers: tuple[bytes, bytes], own_pages_only: bool = False, **server: Any) -> str:
    """What is refused of a request with these headers."""
    try:
        Origins(ServerSettings(**server)).check(list(headers), own_pages_only=own_pages_only)
    except Refusal as refusal:
        return refusal.code
    return ""


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LocalHost:8080", b"127.0.0.1:8080", b"127.9.9.9", b"[::1]", b"[::1]:8080"],
)
def test_local_hosts_are_accepted(host: bytes) -> None:
    assert code_of((b"host", host)) == ""


@pytest.mark.parametrize(
    "host",
    [
        b"", b"evil", b"evil@localhost", b"localhost@evil", b"localhost:8080@evil", b"localhost/",
        b"localhost#evil", b"localhost?", b"localhost\\evil", b" localhost", b"localhost ",
        b"localhost:", b"localhost:x", b"localhost:80:80", b"localhost:123456", b"local\thost",
        b"localhost\n", b"localhost\x00", b"localhost,evil", b"localhost.evil", b"localhost%00",
        b"::1", b"[::1", b"[::1]x", b"[127.0.0.1]", b"[::1%25lo]", b"[v1.x]", b"0.0.0.0", b"127.1",
        b"2130706433", b"0x7f.0.0.1", b"xlocalhost", b"\xe2\x80\xa5localhost", b"127.0.0.1.evil",
    ],
)  # fmt: skip
def test_other_hosts_are_refused(host: bytes) -> None:
    assert code_of((b"host", host)) == "foreign_host"


def test_repeated_host_or_origin_header_is_refused() -> None:
    own = (b"host", b"localhost")
    assert code_of(own, own) == "foreign_host"
    origin = (b"origin", b"http://localhost")
    assert code_of(own, origin) == ""
    assert code_of(own, origin, origin) == "foreign_origin"


@pytest.mark.parametrize(
    "origin",
    [
        b"http://evil/://localhost:8080", b"http://evil@localhost:8080", b"null", b"",
        b"localhost:8080", b"://localhost:8080", b"http:localhost:8080", b"http://localhost:8080/",
        b"http://localhost:8080@evil", b"http://localhost:80800", b"http://localhost", b"*",
        b"http://localhost:8080 http://evil", b"http://LOCALHOST:8080x", b"ftp://localhost:8080",
        b"evil http://localhost:8080", b"http://http://localhost:8080", b"http://127.0.0.1:8080",
    ],
)  # fmt: skip
def test_foreign_origins_are_refused(origin: bytes) -> None:
    host = (b"host", b"localhost:8080")
    assert code_of(host, (b"origin", origin)) == "foreign_origin"
    assert code_of((b"origin", origin)) == "foreign_origin"
    assert code_of(host, (b"origin", b"http://localhost:8080")) == ""
    assert code_of(host, (b"origin", b"https://localhost:8080")) == ""


def test_cross_site_request_without_origin_is_refused() -> None:
    host = (b"host", b"localhost:8080")
    for site in (b"cross-site", b"same-site", b"what"):
        assert code_of(host, (b"sec-fetch-site", site)) == "foreign_origin"
    for site in (b"none", b"same-origin"):
        assert code_of(host, (b"sec-fetch-site", site)) == ""


def test_configured_hosts_and_origins_are_allowed() -> None:
    more: dict[str, Any] = {
        "allowed_hosts": ("Models.Internal", "fe80::7"),
        "allowed_origins": (PAGE,),
    }
    assert code_of((b"host", b"models.internal:443"), **more) == ""
    assert code_of((b"host", b"[fe80::7]:80"), **more) == ""
    assert code_of((b"host", b"x.models.internal"), **more) == "foreign_host"
    page = (b"origin", PAGE.encode())
    assert code_of((b"host", b"localhost:8080"), page, **more) == ""
    # It may use models, and not put them to sleep.
    own_only = code_of((b"host", b"localhost:8080"), page, own_pages_only=True, **more)
    assert own_only == "foreign_origin"


def test_check_time_is_linear_in_header_size() -> None:
    def cpu_s(size: int) -> float:
        hostile = [b"a" * size, b"[" + b":" * size, b"localhost:" + b"1" * size, b"." * size]
        began = time.process_time()
        for _ in range(20):
            for value in hostile:
                code_of((b"host", value))
                code_of((b"host", b"localhost"), (b"origin", value))
        return time.process_time() - began

    cpu_s(1 << 10)
    assert cpu_s(1 << 20) < 64 * max(cpu_s(1 << 14), 0.001)


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "localhost", "http://a/", "http://a/b", "http://u@a", "http://*.a", "//a", "a:b"],
)
def test_invalid_allowed_origins_are_refused(origin: str) -> None:
    with pytest.raises(ControllerConfigError, match=r"server\.allowed_origins"):
        parse(f"server: {{allowed_origins: ['{origin}']}}", {})


@pytest.mark.parametrize("host", ["", "a:80", "http://a", "a b", "*"])
def test_invalid_allowed_hosts_are_refused(host: str) -> None:
    with pytest.raises(ControllerConfigError, match=r"server\.allowed_hosts"):
        parse(f"server: {{allowed_hosts: ['{host}']}}", {})


def test_allowed_origins_are_normalized() -> None:
    text = "server: {allowed_origins: ['HTTP://a']}"
    with pytest.raises(ControllerConfigError):
        parse(text, {})
    text = "server: {allowed_origins: ['http://UI.example:80', 'https://[::1]:443', 'app://Own']}"
    found = parse(text, {}).server.allowed_origins
    assert found == ("http://ui.example", "https://[::1]", "app://Own")


# ----------------------------------------------------------------------------------------- CORS


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    server = {"allowed_origins": [PAGE, APP], "max_headers": 8192}
    auth = {"api_keys": ["key"], "admin_keys": ["admin"]}
    with Controller(config_for(engine, server=server, auth=auth)) as front:
        yield front


@pytest.mark.parametrize("origin", [PAGE, APP])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere"])
def test_cors_preflight_allows_configured_origins(
    front: Controller, origin: str, path: str
) -> None:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    answer = front.client.options(path, headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in answer.headers


def test_every_response_has_cors_headers(front: Controller, engine: Engine) -> None:
    key = {"authorization": "Bearer key", "origin": PAGE}
    fake = {"status": 500}
    answers = [
        front.post("/v1/completions", {"model": "m"}, headers=key),
        front.post("/v1/completions", {"model": "m", "stream": True}, headers=key),
        front.post("/v1/completions", {"model": "m", "fake": fake}, headers=key),
        front.post("/v1/completions", {"model": "nobody"}, headers=key),
        front.post("/v1/completions", {"model": "m"}, headers={"origin": PAGE}),
        front.client.request("PROPFIND", "/v1/completions", headers={"origin": PAGE}),
        front.get("/models", headers=key),
        front.get("/nowhere", headers=key),
        front.get("/models", headers={**key, "x-big": "x" * 9000}),
    ]
    assert [a.status_code for a in answers] == [200, 200, 500, 404, 401, 405, 200, 404, 431]
    for answer in answers:
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE], answer
        assert "origin" in answer.headers.get_list("vary")
    assert b"[DONE]" in answers[1].content
    assert "origin" not in {name.lower() for name, _ in engine.state()["headers"]}


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:3001", "https://localhost:3000", "null",
               "http://localhost:3000/", "HTTP://localhost:3000", "http://localhost:3000.evil"],
)  # fmt: skip
def test_foreign_origin_gets_no_cors_headers(front: Controller, origin: str) -> None:
    key = {"authorization": "Bearer key", "origin": origin}
    asked = {"origin": origin, "access-control-request-method": "POST"}
    for answer in (
        front.post("/v1/completions", {"model": "m"}, headers=key),
        front.get("/models", headers=key),
        front.client.options("/v1/completions", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["vary"] == "origin"
    assert front.client.options("/v1/completions", headers=asked).status_code == 405


def test_engine_cors_headers_are_replaced(front: Controller, engine: Engine) -> None:
    """vLLM says `access-control-allow-origin: *` of its own accord."""
    engine.change(cors="*")
    try:
        headers = {"authorization": "Bearer key", "origin": PAGE}
        answer = front.post("/v1/completions", {"model": "m"}, headers=headers)
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
        headers["origin"] = "http://evil.example"
        answer = front.post("/v1/completions", {"model": "m"}, headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    finally:
        engine.reset()


def test_allowed_origin_without_keys_may_only_use_models(
    engine: Engine,
) -> None:
    config = config_for(engine, server={"allowed_origins": [APP]})
    with Controller(config) as front:
        page = {"origin": APP}
        answer = front.post("/v1/completions", {"model": "m"}, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        refused = front.post("/action/sleep/m", headers=page)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")
        assert front.post("/v1/completions", {"model": "m"}, headers={"origin": PAGE}).is_error
        front.write(config_for(engine, server={"allowed_origins": [PAGE]}))
        assert front.post("/admin/reload").status_code == 200
        answer = front.post("/v1/completions", {"model": "m"}, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
