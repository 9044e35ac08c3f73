"""Names of prompts' beginnings: equal beginnings have equal names, whatever follows."""

from __future__ import annotations

import json

from kvelastic.integration.ray.prompt_prefix import MOST_PIECES, PIECE_BYTES, prefix_of


def chat(*texts: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", **more, "messages": messages}).encode()


def test_longer_conversation_keeps_its_prefix_names() -> None:
    first = prefix_of(chat("x" * 3 * PIECE_BYTES))
    longer = prefix_of(chat("x" * 3 * PIECE_BYTES, "and more " * PIECE_BYTES))
    assert len(first) == 3
    assert longer[:3] == first


def test_other_request_fields_do_not_change_prefix_names() -> None:
    long = "x" * 2 * PIECE_BYTES
    assert prefix_of(chat(long)) == prefix_of(chat(long, temperature=0, stream=True))


def test_prompts_differing_early_share_no_prefix_names() -> None:
    names = [set(prefix_of(chat(start + "x" * 4 * PIECE_BYTES))) for start in "ab"]
    assert not names[0] & names[1]


def test_number_of_prefix_names_is_bounded() -> None:
    body = json.dumps({"prompt": "x" * (2 * MOST_PIECES * PIECE_BYTES)}).encode()
    assert len(prefix_of(body)) == MOST_PIECES


def test_short_prompts_and_invalid_bodies_have_no_names() -> None:
    for body in (b"", b"{", b"[]", b'{"model": "m"}', chat("short"), b"[" * 100_000):
        assert prefix_of(body) == ()
