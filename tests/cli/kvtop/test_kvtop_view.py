"""kvtop's screen as text: it fits every size, and says what is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from scenes import ALL, EMPTY, GIB, MANY, ONE, TIERS, WIDE, device, instance
from wcwidth import wcwidth

from kvelastic.cli.kvtop.bars import device_bar, sparkline
from kvelastic.cli.kvtop.help_page import help_lines
from kvelastic.cli.kvtop.keys import Ui, press
from kvelastic.cli.kvtop.scene import Scene
from kvelastic.cli.kvtop.text import (
    ASCII,
    CELLS,
    UNICODE,
    Glyphs,
    Line,
    Span,
    cut,
    fit,
    short_count,
    short_rate,
    short_size,
    spread,
    wrap,
)
from kvelastic.cli.kvtop.view import plain_screen, screen
from kvelastic.cli.rendering.columns import shares

SIZES = [(1, 1), (2, 1), (1, 5), (3, 3), (20, 5), (40, 10), (80, 24), (120, 40), (200, 50)]
KEYS = {
    "list": "",
    "end": "G",
    "sorted": "ssssr",
    "filter": "/qwen",
    "nothing": "/no such thing",
    "entry": "l512",
    "wrong": "lx\n",
    "confirm": "l512M\n",
    "asked": "p-5\ny",
    "sleep": "z",
    "help": "?",
    "help further": "?jjj",
}


def width_of(line: Line) -> int:
    """Counted by another library than the one that kvtop uses."""
    return sum(max(0, wcwidth(character)) for span in line for character in span.text)


def state(scene: Scene, typed: str) -> Ui:
    ui = Ui()
    for character in typed:
        ui, _ = press(ui, "enter" if character == "\n" else character, scene.instances)
    return ui


def draw(
    scene: Scene, ui: Ui | None = None, width: int = 80, height: int = 24, glyphs: Glyphs = UNICODE
) -> list[str]:
    lines = screen(scene, ui or Ui(), width=width, height=height, glyphs=glyphs, clock="12:30:01")
    return ["".join(span.text for span in line).rstrip() for line in lines]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("typed", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("scene", ALL.values(), ids=ALL)
def test_screen_fits_every_size(scene, typed, glyphs):
    ui = state(scene, typed)
    for width, height in SIZES:
        lines = screen(scene, ui, width=width, height=height, glyphs=glyphs, clock="12:30:01")
        assert len(lines) == height, (width, height)
        assert max(map(width_of, lines)) <= width, (width, height)
        if ui.mode != "help":  # whose lines begin with spaces
            assert any(span.text.strip() for line in lines for span in line), (width, height)
        if glyphs is ASCII:
            assert all(span.text.isascii() for line in lines for span in line)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ALL.values(), ids=ALL)
def test_screen_fits_sizes_near_the_edges(scene):
    for width in range(1, 100):
        for height in (1, 2, 3, 4, 5, 6, 7, 9, 12):
            lines = screen(scene, Ui(), width=width, height=height, glyphs=UNICODE, clock="1")
            assert len(lines) == height
            assert max(map(width_of, lines)) <= width


def test_zero_size_screen_has_no_lines():
    assert screen(ONE, Ui(), width=0, height=5, glyphs=UNICODE, clock="") == []
    assert screen(ONE, Ui(), width=5, height=0, glyphs=UNICODE, clock="") == []


def test_80_columns_show_the_essential_values():
    lines = draw(ONE)
    heading = next(line for line in lines if line.startswith("NAME"))
    for title in ("STATE", "MIN", "LIMIT", "MAPPED", "OF LIMIT", "IN/S", "OUT/S", "TREND"):
        assert title in heading
    row = next(line for line in lines if line.startswith("kvelastic_vllm_1"))
    for value in ("applied", "1.00G", "4.00G", "2.00G", "12", "█"):
        assert value in row
    assert "8.00G of 16.0G" in lines[2]
    assert "7.00G free" in lines[2]
    assert "64.0M asked" in lines[2]
    assert "others 1.00G" in lines[3]


def test_wide_screens_show_more_columns():
    heading = next(line for line in draw(ONE, width=200, height=50) if line.startswith("NAME"))
    for title in ("PRIO", "IN USE", "EVICT/S", "MODEL"):
        assert title in heading


def test_smallest_screens_still_show_an_instance():
    assert draw(ONE, width=20, height=1)[0].startswith("kvelastic")
    assert draw(ONE, width=1, height=1) != [""]


def test_selected_instance_is_visible_and_marked():
    ui = state(MANY, "G")
    lines = screen(MANY, ui, width=80, height=24, glyphs=UNICODE, clock="")
    marked = [line for line in lines if any(span.is_selected for span in line)]
    assert [line[0].text.strip() for line in marked] == ["kvelastic_sglang_9"]  # last by name
    assert width_of(marked[0]) == 80  # the mark goes through to the edge


def test_filtered_instances_are_counted():
    lines = draw(MANY, state(MANY, "/sglang_11"))
    assert lines[0].startswith(" kvtop  1 of 60 instances")
    assert "/sglang_11" in lines[0]
    assert any("None of 60 has /zzz" in line for line in draw(MANY, state(MANY, "/zzz")))
    assert any("No instances" in line for line in draw(EMPTY))


def test_excess_devices_are_counted():
    scene = replace(ONE, devices=tuple(device(f"GPU-{n}") for n in range(16)))
    assert any(line.startswith("and 10 more") for line in draw(scene))


def test_unreadable_ledger_shows_the_reason():
    assert any("it belongs to user 1000" in line for line in draw(MANY, height=50))


def test_prompts_show_the_input_at_any_width():
    ui = state(ONE, "l123456")
    assert draw(ONE, ui)[-1] == "New limit of kvelastic_vllm_1 (4.00 GiB): 123456_"
    assert draw(ONE, ui, width=4, height=3)[-1] == "456_"
    question = "Set limit of kvelastic_vllm_1 from 4.00 GiB to 512.00 MiB? y = yes, n = no"
    assert draw(ONE, state(ONE, "l512M\n"))[-1] == question
    assert draw(ONE, state(ONE, "l512M\n"), width=24, height=2)[-1] == "limit 512.00 MiB? y/n"


def test_sleep_and_wake_have_their_own_prompts():
    sleeping = Scene(1.0, (), (instance("a", state="asleep", asleep=True, over_bytes=GIB),))
    question = "Put kvelastic_vllm_1 to sleep, which drops all that it has cached? y = yes, n = no"
    assert draw(ONE, state(ONE, "z"), width=100)[-1] == question
    assert draw(ONE, state(ONE, "z"), width=12, height=2)[-1] == "sleep? y/n"
    assert draw(sleeping, state(sleeping, "w"))[-1] == "Wake a? y = yes, n = no"
    assert any(line.split()[:2] == ["a", "asleep"] for line in draw(sleeping))
    assert "a  asleep  1.00G to go until it sleeps" in draw(sleeping)
    assert "z w " in "\n".join(draw(ONE, state(ONE, "?")))


def test_help_fits_80_by_24_and_scrolls_below():
    text = "\n".join(draw(ONE, state(ONE, "?")))
    assert "TREND" in text
    assert "more" not in text
    assert max(map(width_of, help_lines(UNICODE))) <= 80
    assert "more" in draw(ONE, state(ONE, "?"), height=10)[-1]
    assert draw(ONE, state(ONE, "?jj"), height=10)[0] == draw(ONE, state(ONE, "?"), height=10)[2]


def test_plain_screen_has_all_instances():
    lines = plain_screen(MANY, 100, ASCII).splitlines()
    assert sum(line.startswith("kvelastic_sglang_") for line in lines) == 60
    assert max(map(len, lines)) <= 100
    assert plain_screen(MANY, 100, ASCII).isascii()
    assert "No instances" in plain_screen(EMPTY, 100, UNICODE)
    assert "漢字" in plain_screen(WIDE, 100, UNICODE)


# ------------------------------------------------------------------------------- parts of it


@pytest.mark.parametrize(
    ("amounts", "whole", "width", "counts"),
    [
        ((50, 20, 10), 100, 10, [5, 2, 1]),
        ((1, 1, 1), 1000, 10, [1, 1, 1]),
        ((100, 100), 100, 10, [5, 5]),
        ((0, 0), 0, 10, [0, 0]),
        ((1, 1, 1), 3, 2, [1, 1, 0]),
        ((5,), 5, 0, [0]),
    ],
)
def test_shares_add_up(amounts, whole, width, counts):
    assert shares(amounts, whole, width) == counts


def test_device_bar_has_all_parts_in_order():
    bar = device_bar(device(), 16, ASCII)
    assert "".join(span.text for span in bar) == "####==-~x......."
    assert [span.style for span in bar] == ["in_use", "cached", "parked", "slack", "others", "free"]


def test_bar_shows_the_reserve_taken_from_the_capacity():
    on_a_gpu = device(
        reserved_bytes=4 * GIB, reserved_of_capacity_bytes=4 * GIB, free_bytes=3 * GIB
    )
    bar = "".join(span.text for span in device_bar(on_a_gpu, 16, ASCII))
    assert bar == "####==-~%%%%x..."
    on_the_host = device(reserved_bytes=4 * GIB)  # all of it lies beside the capacity
    bar = "".join(span.text for span in device_bar(on_the_host, 16, ASCII))
    assert bar == "####==-~x......."
    for place in (on_a_gpu, on_the_host):
        lines = draw(replace(ONE, devices=(place,)), width=120)
        assert "reserved 4.00G" in lines[3]


def test_reserve_is_shown_below_the_table():
    awake = instance("a", reserved_bytes=3 * GIB)
    assert "priority 0  reserved 3.00 GiB  model" in draw(replace(ONE, instances=(awake,)))[-3]
    asleep = replace(awake, asleep=True, state="asleep")
    lines = draw(replace(ONE, instances=(asleep,)))
    assert "priority 0  reserved when awake 3.00 GiB  model" in lines[-3]


def test_tiers_have_a_column_and_detail_lines():
    lines = draw(TIERS, width=100, height=30)
    heading = next(line for line in lines if line.startswith("NAME"))
    row = next(line for line in lines if line.startswith("a_with_tiers"))
    at = heading.index("TIERS")
    assert row[at : at + len("TIERS")] == "9.00G"
    counts = "hits 12k  misses 678  errors 0  blocks 1204"
    assert lines[-4] == f"tier host  ▓▓▓▓▓▓▓▓·· 3.00G of 4.00G  {counts}  load 0.72 ms"
    assert lines[-3].startswith("tier disk  stuck  ▓▓▓▓▓▓▓▓·· 3.00G of 4.00G  hits 12k  misses 678")
    assert "errors 7" in lines[-3]
    assert lines[-2] == f"tier mooncake  3.00G  {counts}"
    assert not any("TIERS" in line for line in draw(ONE, width=200, height=50))


def test_selection_does_not_move_the_lines_above():
    lines = draw(TIERS, height=30)
    other = draw(TIERS, state(TIERS, "j"), height=30)
    assert other[:-8] == lines[:-8]
    assert other[-8].startswith("b_without")
    assert other[-4:-1] == ["", "", ""]  # where the other one's tiers stood
    low = draw(TIERS, height=12)  # too low for all of them
    assert [line[:9] for line in low if line.startswith("tier ")] == ["tier host"]


@pytest.mark.parametrize(
    ("changes", "style"),
    [({}, "plain"), ({"is_stuck": True}, "bad"), ({"is_current": False}, "bad")],
)
def test_stuck_or_stale_tier_is_highlighted_in_table(changes, style):
    host = TIERS.instances[0].tiers[0]
    shown = instance("b", tiers=(host, structs.replace(host, **changes)))
    lines = screen(
        replace(TIERS, instances=(instance("a"), shown)),
        Ui(),
        width=80,
        height=24,
        glyphs=UNICODE,
        clock="",
    )
    row = next(line for line in lines if line and line[0].text.startswith("b"))
    assert [span.style for span in row if span.text.strip() == "6.00G"] == [style]


def test_instances_can_be_sorted_by_tier_usage():
    ui = replace(Ui(), order="tiers")
    rows = [line for line in draw(TIERS, ui, width=120) if line.startswith(("a_", "b_"))]
    assert [row.split()[0] for row in rows[:2]] == ["a_with_tiers", "b_without"]
    assert any("▼TIERS" in line for line in draw(TIERS, ui, width=120))


def test_sparklines():
    assert sparkline((), 3, ASCII) == "   "
    assert sparkline((0, 0), 3, ASCII) == " __"
    assert sparkline((0, 50, 100), 3, ASCII) == "_-#"[0] + sparkline((50, 100), 2, ASCII)
    assert sparkline((1, 1000), 2, ASCII) == ".#"  # not nothing
    assert sparkline((9, 9, 9, 0), 2, ASCII) == "#_"
    assert sparkline((5,), 0, ASCII) == ""


def test_short_numbers_fit():
    assert [short_size(n) for n in (None, 0, 512, 1 << 10, 96 << 20, 1023 << 20, 4 << 30)] == [
        "-", "0", "512B", "1.00K", "96.0M", "1023M", "4.00G",
    ]  # fmt: skip
    assert [short_rate(r) for r in (None, 0.0, 0.3, 12.4, 9999.0, 12345.0, 2e6)] == [
        "-", "0", "0.3", "12", "9999", "12k", "2.0M",
    ]  # fmt: skip
    assert [short_count(n) for n in (None, -7, 99999, 1 << 62, -(1 << 62))] == [
        "-", "-7", "99999", "big", "-big",
    ]  # fmt: skip
    for power in range(64):
        for number in (2**power - 1, 2**power, 10**power // 3):
            assert len(short_size(number)) <= CELLS, number
            assert len(short_rate(float(number))) <= CELLS, number


def test_cut_and_fill_count_cells_not_characters():
    assert fit("日本語", 5) == "日本 "
    assert fit("日本語", 5, "…") == "日本…"
    assert fit("日本語", 4, "…") == "日… "
    assert fit("ab", 1, "…") == "…"
    assert cut([Span("日本"), Span("x")], 3) == [Span("日")]
    assert cut([Span("e\u0301x")], 1) == [Span("e\u0301")]
    assert spread([Span("abc")], [Span("xyz")], 6) == [Span("abc")]


def test_wrapping():
    assert wrap("one two three", 7, 3) == ["one two", "three"]
    assert wrap("one two three", 7, 1, "…") == ["one tw…"]
    assert wrap("abcdefgh", 3, 5) == ["abc", "def", "gh"]
    assert wrap("日本語", 1, 2) == ["?", "?"]  # no room for one of them
    assert wrap("x", 0, 3) == []


def test_arrow_marks_the_sort_column():
    up = draw(ONE, width=200)
    assert any(line.startswith("NAME▲") for line in up)
    down = draw(ONE, state(ONE, "ss"), width=200)
    assert any("▼MAPPED" in line for line in down)
    assert any("▲MAPPED" in line for line in draw(ONE, state(ONE, "ssr"), width=200))


def test_instance_over_its_limit_is_explained_below():
    scene = replace(
        ONE, instances=(instance("a", state="shrinking", over_bytes=GIB, reason="x y"),)
    )
    assert "a  shrinking  1.00G over its limit  x y" in draw(scene)
