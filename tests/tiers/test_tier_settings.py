"""KVELASTIC_TIERS and its companions: what they accept, and what they say to the rest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.config import load
from kvelastic.errors import ConfigError, InvalidArgumentError
from kvelastic.tier_list import TierSpec, parse_tiers
from kvelastic.tiers.opening import rules_of, staging_slots
from kvelastic.tiers.policy import Copies, Rules, WritePolicy

GIB = 1 << 30


def test_tier_list_is_parsed_in_order() -> None:
    text = "host:4G, disk:/a+/b/c:200G,folder:/d:1.5G,mooncake:10.0.0.1:50051"
    assert parse_tiers(text) == (
        TierSpec("host", limit_bytes=4 * GIB),
        TierSpec("disk", ("/a", "/b/c"), 200 * GIB),
        TierSpec("folder", ("/d",), 3 * GIB // 2),
        TierSpec("mooncake", address="10.0.0.1:50051"),
    )
    assert parse_tiers("folder:/d") == (TierSpec("folder", ("/d",)),)
    assert parse_tiers("disk:/a:1G,disk:/b:1G")[1].folders == ("/b",)
    assert parse_tiers("mooncake:h:1+2G")[0] == TierSpec("mooncake", (), 2 * GIB, "h:1")
    assert parse_tiers("none") == parse_tiers(" ") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host", "does not say"),
        ("host:", "does not say"),
        ("host:much", "not understood"),
        ("host:0", "size of 0"),
        ("disk:/a", "no size"),
        ("disk:a:1G", "not absolute"),
        ("disk:/a:/b:1G", "colon"),
        ("folder:/a+/b", "several"),
        ("mooncake:a b", "address"),
        ("mooncake:a:1+", "not understood"),
        ("tape:1G", "no kind"),
        ("host:1G,host:2G", "twice"),
        ("disk:/a:1G,folder:/a", "twice"),
        ("disk:/a:1G,disk:/a/:1G", "twice"),
        ("disk:/a+//a/./b/..:1G", "twice"),
        (",".join(["disk:/a:1G"] * 9), "more than 8"),
        ("x" * 5000, "more than 4096"),
        ("host:1G,", "does not say"),
    ],
)
def test_invalid_tier_list_is_named(text, words) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_tiers(text)
    with pytest.raises(ConfigError, match=r"KVELASTIC_TIERS=.*set it to"):
        load({"KVELASTIC_TIERS": text})


@given(st.text(alphabet="hostdiskfolder:/,+0123456789GM .-\0", max_size=60))
def test_random_text_is_parsed_or_rejected(text) -> None:
    try:
        for spec in parse_tiers(text):
            assert spec.kind in ("host", "disk", "folder", "mooncake")
    except InvalidArgumentError:
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POLICY", "write_never"),
        ("COPIES", "2"),
        ("STAGING", "0"),
        ("WATERMARK", "101%"),
        ("IDLE_SECONDS", "soon"),
        ("LIMIT_SECONDS", "-1"),
        ("SLEEP_SECONDS", "1e3"),
        ("RECLAIM_SECONDS", "nan"),
        ("WRITE_RATE", "0"),
        ("DAILY_WRITE", "lots"),
    ],
)
def test_invalid_value_names_its_variable(name, value) -> None:
    with pytest.raises(ConfigError, match=f"KVELASTIC_TIER_{name}="):
        load({f"KVELASTIC_TIER_{name}": value})


def test_settings_follow_the_variables() -> None:
    settings = load(
        {
            "KVELASTIC_TIERS": "host:1G",
            "KVELASTIC_TIER_POLICY": "WRITE_THROUGH",
            "KVELASTIC_TIER_COPIES": "first",
            "KVELASTIC_TIER_STAGING": "1M",
            "KVELASTIC_TIER_WATERMARK": "25%",
            "KVELASTIC_TIER_IDLE_SECONDS": "-1",
            "KVELASTIC_TIER_RECLAIM_SECONDS": "0.01",
            "KVELASTIC_TIER_LIMIT_SECONDS": "3",
            "KVELASTIC_TIER_SLEEP_SECONDS": "7",
            "KVELASTIC_TIER_WRITE_RATE": "100M",
            "KVELASTIC_TIER_DAILY_WRITE": "1T",
        }
    )
    rules = rules_of(settings)
    assert rules.policy is WritePolicy.WRITE_THROUGH
    assert rules.copies is Copies.FIRST
    assert (rules.reclaim_s, rules.limit_s, rules.sleep_s) == (0.01, 3, 7)
    assert rules.watermark == 0.25
    assert rules.idle_after_s == math.inf
    assert rules.write_bytes_per_s == 100 << 20
    assert settings.tier_daily_write == 1 << 40
    assert staging_slots(settings, 1 << 18) == 4
    assert staging_slots(settings, 1 << 10) == 1024


def test_variable_defaults_match_the_code() -> None:
    assert rules_of(load({})) == Rules()
