"""Sizes and percentages as text, there and back (durations: `controller/test_settings.py`)."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvelastic.errors import InvalidArgumentError
from kvelastic.units import (
    GIB_BYTES,
    KIB_BYTES,
    MAX_SIZE_BYTES,
    MIB_BYTES,
    TIB_BYTES,
    format_size,
    parse_percent,
    parse_size,
)

UNITS = {"B": 1, "K": KIB_BYTES, "M": MIB_BYTES, "G": GIB_BYTES, "T": TIB_BYTES}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("0G", 0),
        ("1024", 1024),
        ("1024B", 1024),
        ("1k", 1024),
        ("512M", 512 << 20),
        ("512MB", 512 << 20),
        ("512mib", 512 << 20),
        ("2G", 2 << 30),
        ("2 GB", 2 << 30),
        ("  2GiB\n", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1.G", 1 << 30),
        (".5K", 512),
        ("3T", 3 << 40),
        ("3TiB", 3 << 40),
        ("1_000_000", 1_000_000),
        ("1,024K", 1 << 20),
        ("0.1T", 109951162777),  # 0.1 * 2**40 = 109951162777.6
        ("0.0", 0),
        ("1.000B", 1),
        ("0.001K", 1),
        (str(MAX_SIZE_BYTES), MAX_SIZE_BYTES),
    ],
)
def test_valid_sizes_are_parsed(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "_", ",", "G", "GiB", "-1", "-1G", "+1", "nan", "inf", "infinity", "1e9"],
        *["1.5.5", "1..5", ".", "1 2", "1P", "1Ki", "1iB", "1KBB", "1bit", "0x10", "12three", "1%"],
        *["٣", "1\x00", "9" * 41, "1" * 5000],
    ],
)
def test_invalid_size_error_has_value_and_accepted_forms(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="K, M, G or T") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["0.5", "0.9B", ".5", "1.5", "1073741824.25b", "0.0001K", "0." + "0" * 39 + "1T"]
)
def test_fraction_of_a_byte_is_refused(text: str) -> None:
    """A unit that was forgotten was a limit of nothing, which takes all that there is."""
    with pytest.raises(InvalidArgumentError, match="a byte; write whole bytes") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [str(MAX_SIZE_BYTES + 1), "8388608T", "9" * 40])
def test_size_above_the_maximum_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="larger than") as caught:
        parse_size(text)
    assert text in str(caught.value)


@given(st.integers(0, 2000), st.sampled_from(sorted(UNITS)), st.booleans(), st.booleans())
@settings(deadline=None)
def test_every_unit_spelling_is_parsed(number: int, unit: str, lower: bool, spaced: bool) -> None:
    spellings = [unit] if unit == "B" else [unit, unit + "B", unit + "iB"]
    for spelling in spellings:
        text = f"{number}{' ' if spaced else ''}{spelling}"
        assert parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(0, MAX_SIZE_BYTES))
@settings(deadline=None)
def test_plain_bytes_round_trip(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    assert parse_size(f"{size_bytes:,}") == size_bytes
    assert parse_size(f"{size_bytes:_}") == size_bytes


@given(st.integers(0, 1 << 62))
@settings(deadline=None)
def test_formatted_size_round_trips_within_rounding(size_bytes: int) -> None:
    text = format_size(size_bytes)
    match = re.fullmatch(r"(\d+(?:\.\d\d)?) (B|KiB|MiB|GiB|TiB)", text)
    assert match is not None
    if match[2] == "B":
        assert parse_size(text) == size_bytes
        assert size_bytes < 1024
        return
    unit_bytes = UNITS[match[2][0]]
    # Half a hundredth by rounding, plus the dropped part of a byte and the float's 53 bits.
    slack = unit_bytes * 0.005 + 1 + size_bytes / (1 << 52)
    assert abs(parse_size(text) - size_bytes) <= slack
    assert float(match[1]) >= 1
    assert match[2] == "TiB" or float(match[1]) < 1024


@given(st.text(max_size=20))
@settings(deadline=None)
def test_arbitrary_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgumentError):
        assert 0 <= parse_size(text) <= MAX_SIZE_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 << 20, "1.50 GiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        ((1 << 40) - 1, "1.00 TiB"),
        (1 << 50, "1024.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "percent"),
    [("0", 0.0), ("80", 80.0), ("80%", 80.0), (" 12.5 % ", 12.5), ("100", 100.0), (".5", 0.5)],
)
def test_percent(text: str, percent: float) -> None:
    assert parse_percent(text) == percent


@pytest.mark.parametrize("text", ["", "%", "-1", "100.01", "101%", "nan", "inf", "ten", "5%%"])
def test_percent_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="0 to 100") as caught:
        parse_percent(text)
    assert repr(text) in str(caught.value)


@pytest.mark.slow
@given(st.floats(0, 100, allow_nan=False))
@settings(deadline=None)
def test_percent_round_trip(percent: float) -> None:
    assert parse_percent(f"{percent:.6f}%") == pytest.approx(percent, abs=1e-6)
