"""kvtop as a program on a terminal: real instances, keys, sizes and signals."""

from __future__ import annotations

import difflib
import itertools
import os
import random
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ledger_instance import Instance
from on_terminal import KVCTL, KVTOP, OnTerminal
from processes import run_python
from segment_owner import Owner
from shown_instance import Shown
from waiting import DEADLINE_S

from kvelastic.shared import segment
from kvelastic.shared.tier_status import TierStatus

pytestmark = pytest.mark.slow


MIB, GIB = 1 << 20, 1 << 30
GOLDEN = Path(__file__).with_name("golden")


def usage(capacity: int, in_use: int, cached: int, parked: int, slack: int) -> dict[str, int]:
    return {
        "capacity_bytes": capacity,
        "mapped_bytes": in_use + cached + parked + slack,
        "in_use_bytes": in_use,
        "cached_bytes": cached,
        "parked_bytes": parked,
        "page_bytes": 2 * MIB,
    }


@pytest.fixture
def tag() -> str:
    """Six characters that no other test has; a golden screen has XXXXXX in their place."""
    return f"{random.randrange(1 << 24):06x}"


@pytest.fixture
def owner(tag: str) -> Iterator[Owner]:
    with Owner(f"kvtop_{tag}") as running:
        yield running


@pytest.fixture
def three(tag: str) -> Iterator[list[Shown]]:
    """Three instances on two devices that only they are on."""
    first, second = f"GPU-first-{tag}", f"GPU-other-{tag}"
    with ExitStack() as stack:
        yield [
            stack.enter_context(shown)
            for shown in (
                Shown(
                    f"{tag}_chat",
                    engine="vllm",
                    model="Qwen/Qwen3-8B",
                    device=first,
                    limit_bytes=30 * GIB,
                    usage=usage(80 * GIB, 20 * GIB, 5 * GIB, 2 * GIB, GIB),
                ),
                Shown(
                    f"{tag}_summaries_at_night",
                    engine="sglang",
                    model="meta-llama/Llama-3.3-70B-Instruct",
                    device=first,
                    limit_bytes=40 * GIB,
                    usage=usage(80 * GIB, 7 * GIB, 9 * GIB, 4 * GIB, 0),
                ),
                Shown(
                    f"{tag}_tiny",
                    engine="vllm",
                    model="tiny",
                    device=second,
                    usage=usage(80 * GIB, 200 * MIB, 0, 0, 0),
                ),
            )
        ]


@pytest.fixture
def tiered(tag: str) -> Iterator[Shown]:
    """One with a tier that is full and a second one that hangs."""
    disk = dict.fromkeys(TierStatus.__struct_fields__, 0) | {
        "tier": "disk",
        "kind": "disk",
        "used_bytes": 200 * GIB,
        "limit_bytes": 200 * GIB,
        "records": 51_200,
        "hits": 40_960,
        "misses": 120,
        "load_us": 720,
        "is_stuck": False,
        "is_current": True,
        "problem": "",
    }
    folder = disk | {"tier": "folder", "kind": "folder", "limit_bytes": None, "load_us": None}
    with Shown(
        f"{tag}_with_tiers",
        engine="vllm",
        model="Qwen/Qwen3-8B",
        device=f"GPU-first-{tag}",
        limit_bytes=30 * GIB,
        usage=usage(80 * GIB, 20 * GIB, 5 * GIB, 2 * GIB, GIB),
        tiers=[disk, folder | {"used_bytes": 3 * GIB, "errors": 7, "is_stuck": True}],
    ) as shown:
        yield shown


def names(three: list[Shown]) -> list[str]:
    return [shown.name for shown in three]


# -------------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize(
    ("columns", "lines", "keys"),
    [(80, 24, ""), (120, 40, "j"), (40, 10, ""), (20, 5, ""), (80, 24, "?")],
)
def test_screen_matches_the_golden_file(three, tag, columns, lines, keys):
    """KVELASTIC_WRITE_GOLDEN=1 writes the files; look at them before they are committed."""
    suffix = "_help" if keys == "?" else ""
    check_golden(f"{columns}x{lines}{suffix}", names(three), tag, columns, lines, keys)


@pytest.mark.parametrize(("columns", "lines"), [(120, 40), (80, 24), (40, 18)])
def test_tiers_screen_matches_the_golden_file(tiered, three, tag, columns, lines):
    of_all = [*names(three), tiered.name]
    check_golden(f"{columns}x{lines}_tiers", of_all, tag, columns, lines, "G")


def check_golden(name: str, of: list[str], tag: str, columns: int, lines: int, keys: str) -> None:
    """The screen after `keys` becomes that of a file."""
    path = GOLDEN / f"{name}.txt"
    with OnTerminal("-n", "0.1", *of, columns=columns, lines=lines) as top:

        def normal() -> str:
            text = top.text.replace(tag, "XXXXXX")
            text = re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", text)
            # What follows the pid on its line is cut at another column for each number of digits.
            return re.sub(r"pid \d+  device \S+", "pid N  device GPU", text) + "\n"

        top.wait_for(f"{tag}_chat"[:8])  # before the first look there is nothing to select
        if keys:  # where there is nothing to select yet, `j` selects nothing
            top.wait_for(lambda: tag in top.text)
        top.press(keys)
        if os.environ.get("KVELASTIC_WRITE_GOLDEN"):
            for _ in range(150):  # until there are rates, and the sparkline is full
                top._read()
            path.write_text(normal())
        try:
            top.wait_for(lambda: normal() == path.read_text())
        except AssertionError:
            diff = difflib.unified_diff(path.read_text().splitlines(), normal().splitlines())
            pytest.fail("\n".join(diff))


def test_page_rates_are_shown(three, tag):
    with OnTerminal("-n", "0.2", f"{tag}_chat", columns=200) as top:
        top.wait_for("applied")

        def rates() -> list[float]:
            row = next(row for row in top.rows if row.startswith(tag))
            found = re.search(r"\s([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+[▁-█]+ ", row)
            return [float(value) for value in found.groups()] if found else []

        top.wait_for(lambda: rates() == [0, 0, 0])

        def is_busy() -> bool:
            # Again and again: a rate is on the screen for one interval only.
            three[0].say(counters={"pages_mapped": 40, "pages_unmapped": 10, "blocks_evicted": 2})
            return len(rates()) == 3 and rates()[0] > rates()[1] > rates()[2] > 0

        top.wait_for(is_busy)
        sizes = itertools.cycle((usage(80 * GIB, GIB, 0, 0, 0), usage(80 * GIB, 28 * GIB, 0, 0, 0)))

        def has_fallen() -> bool:
            # Again and again: a fall is on the screen for as many looks as there are cells.
            three[0].say(usage=next(sizes))
            return "█▂" in top.text

        top.wait_for(has_fallen)
        three[0].say(usage=usage(80 * GIB, GIB, 0, 0, 0))
        top.wait_for("in use 8.00G")


def test_ended_instance_is_reported_and_removed(owner):
    with OnTerminal("-n", "0.1", owner.name) as top:
        top.wait_for(f"{owner.name}")
        owner.kill()
        top.wait_for(f"{owner.name} has ended")
        top.wait_for("No instances of kvelastic run here.")
        assert not owner.path.exists()


def colours(top: OnTerminal, character: str) -> set[str]:
    return {
        cell.fg
        for line in top.screen.buffer.values()
        for cell in line.values()
        if cell.data == character
    }


def test_colours_follow_the_terminal(three):
    with OnTerminal(*names(three)) as top:
        top.wait_for("applied")
        assert colours(top, "▓") == {"cyan", "default"}  # the selected line has none
    with OnTerminal(*names(three), NO_COLOR="1") as top:
        top.wait_for("applied")
        assert colours(top, "▓") == {"default"}
    with OnTerminal(*names(three), TERM="vt100", LC_ALL="C") as top:
        top.wait_for("applied")
        assert "####" in top.text
        assert top.raw.isascii()


# ------------------------------------------------------------------------------------ changes


def change(top: OnTerminal, key: str, value: str) -> None:
    top.press(key)
    top.wait_for("New ")
    top.press(value)
    top.wait_for(f"{value}_")
    top.press("\r")
    top.wait_for("y = yes")
    top.press("y")


def test_limit_key_reaches_the_instance(owner):
    with OnTerminal("-n", "0.1", owner.name) as top:
        top.wait_for(f"{owner.name}")
        change(top, "l", "48M")
        top.wait_for(f"{owner.name}: limit 48.00 MiB applied; 48.00 MiB are mapped")
        assert segment.inspect(owner.name).request["limit_bytes"] == 48 * MIB
        top.wait_for(" 48.0M ")
        change(top, "l", "25%")
        top.wait_for("limit 1.00 GiB applied")
        assert segment.inspect(owner.name).request["limit_bytes"] == GIB


def test_min_and_priority_keys_reach_the_instance(owner):
    with OnTerminal(owner.name) as top:
        top.wait_for(f"{owner.name}")
        change(top, "m", "32M")
        # This owner answers without taking guarantees: that it did not is what must be seen.
        top.wait_for("guarantee 32.00 MiB not taken by the instance")
        change(top, "p", "-7")
        top.wait_for("priority -7 not taken")
        request = segment.inspect(owner.name).request
        assert (request["min_bytes"], request["priority"]) == (32 * MIB, -7)
        assert request["limit_bytes"] is None


def test_real_instance_and_its_ledger_are_shown():
    with (
        Instance(KVELASTIC_HOST_MEMORY="64M") as real,
        OnTerminal("-n", "0.1", real.name, columns=120) as top,
    ):
        real.alloc(8)  # two pages of 2 MiB
        top.wait_for(" of 64.0M")
        top.wait_for("in use 4.00M")
        top.wait_for("others 0")  # only a ledger knows
        change(top, "m", "8M")
        top.wait_for(f"{real.name}: guarantee 8.00 MiB applied")
        top.wait_for("others 0  min 8.00M")
        change(top, "p", "3")
        top.wait_for("priority 3 applied")
        change(top, "m", "80M")
        top.wait_for("guarantee 80.00 MiB refused")
        change(top, "l", "32M")
        top.wait_for("limit 32.00 MiB applied")
        top.wait_for("limit 32.00 MiB  min 8.00 MiB  priority 3")


def test_sleep_and_wake_keys_reach_the_instance():
    with Instance(KVELASTIC_HOST_MEMORY="64M") as real, OnTerminal("-n", "0.1", real.name) as top:
        real.cache(real.alloc(8))
        top.wait_for("applied")
        top.press("z")
        top.wait_for("y = yes")
        top.press("y")
        top.wait_for(f"{real.name}: sleep applied; 0 B are mapped")
        top.wait_for(lambda: any(row.split()[1:2] == ["asleep"] for row in top.rows))
        assert real.mapped_bytes == 0
        top.press("w")
        top.wait_for("Wake ")
        top.press("n")
        top.wait_for("nothing was changed")
        assert real.alloc(1) is None
        top.press("w")
        top.wait_for("Wake ")
        top.press("y")
        top.wait_for(f"{real.name}: wake applied")
        top.wait_for(lambda: any(row.split()[1:2] == ["applied"] for row in top.rows))
        assert real.alloc(1) is not None


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("refuse", "refused: it is only a test"),
        ("shrink", "accepted; in whole pages the limit is 2.00 MiB (1 page"),
        ("mute", "limit 1.00 MiB requested; no reply yet"),
    ],
)
def test_other_request_results_are_shown(tag, mode, text):
    with Owner(f"kvtop_{tag}", mode) as running, OnTerminal(running.name, columns=120) as top:
        top.wait_for(running.name)
        change(top, "l", "1M")
        top.wait_for(text)


def test_unconfirmed_change_is_not_requested(owner):
    with OnTerminal(owner.name) as top:
        top.wait_for(owner.name)
        top.press("l64M\r")
        top.wait_for("y = yes")
        top.press("n")
        top.wait_for("nothing was changed")
        top.press("l64M\x1b")
        top.wait_for(lambda: "New limit" not in top.text)
        top.press("q")
        assert top.ended() == 0
    assert segment.inspect(owner.name).request["revision"] == 0


def test_keys_work_with_a_long_interval(owner):
    with OnTerminal("-n", "3600", owner.name) as top:
        top.wait_for(owner.name)
        top.press("?")
        top.wait_for("evicted when needed")
        top.press("q")
        top.wait_for(owner.name)
        change(top, "l", "48M")
        top.wait_for(" 48.0M ")  # an answer makes it look, too
        top.press("/zzz")
        top.wait_for("None of 1 has /zzz")


def test_arrow_keys_and_escape(three, tag):
    with OnTerminal(*names(three)) as top:
        top.wait_for(f"{tag}_chat  applied")  # below the table: the selected one
        top.press("\x1b[B\x1b[B")
        top.wait_for(f"{tag}_tiny  applied")
        top.press("\x1b[A")
        top.wait_for(f"{tag}_summaries_at_night  applied")
        top.press("/tiny\r")
        top.wait_for("1 of 3 instances")
        top.press("\x1b")
        top.wait_for(" 3 instances")


# ---------------------------------------------------------------------------- sizes and endings


def test_resize_at_any_time(three, tag):
    with OnTerminal(*names(three)) as top:
        top.wait_for("TREND")
        top.resize(200, 50)
        top.wait_for("EVICT/S")
        assert max(map(len, top.rows)) > 150
        for columns, lines in ((1, 1), (2, 3), (20, 5), (5, 2), (300, 3), (1, 60)):
            top.resize(columns, lines)
            top.press("j?q")
        top.resize(80, 24)
        top.wait_for("TREND")
        top.wait_for("j/k select")
        assert max(map(len, top.rows)) <= 80
        top.press("q")
        assert top.ended() == 0
        assert b"Traceback" not in top.raw


@pytest.mark.parametrize(("columns", "lines"), [(1, 1), (2, 1), (3, 2), (20, 5), (200, 50)])
def test_start_on_any_terminal_size(owner, columns, lines):
    with OnTerminal("-n", "0.1", owner.name, columns=columns, lines=lines) as top:
        top.wait_for(lambda: any(row.strip() for row in top.rows))
        top.press("jl64M\r")
        top.press("n?q")
        top.press("q")
        assert top.ended() == 0
        assert b"Traceback" not in top.raw


@pytest.mark.parametrize("way", ["q", "ctrl-c", "SIGTERM", "SIGINT", "SIGHUP", "q in a prompt"])
def test_every_exit_restores_the_terminal(owner, way):
    with OnTerminal(owner.name, TERM="xterm-256color") as top:
        before = termios.tcgetattr(top.fd)
        top.wait_for(lambda: owner.name.encode() in top.raw)
        assert not termios.tcgetattr(top.fd)[3] & termios.ICANON
        if way == "q":
            top.press("q")
        elif way == "ctrl-c":
            top.press("\x03")
        elif way == "q in a prompt":
            top.press("l64\x03")
        else:
            top.signal(getattr(signal, way))
        assert top.ended() == 0
        assert termios.tcgetattr(top.fd) == before
        assert before[3] & termios.ICANON
        assert before[3] & termios.ECHO
        assert top.raw.rfind(b"\x1b[?1049l") > top.raw.rfind(b"\x1b[?1049h") >= 0
        assert top.raw.rfind(b"\x1b[?25h") > top.raw.rfind(b"\x1b[?25l") >= 0
        assert b"Traceback" not in top.raw


def test_dumb_terminal_is_rejected(owner):
    with OnTerminal(owner.name, TERM="dumb") as top:
        assert top.ended() == 1
        assert b"--once" in top.raw
        assert b"Traceback" not in top.raw


# ------------------------------------------------------------------------------- no terminal


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | environment, timeout=DEADLINE_S
    )


def test_once_prints_a_plain_screen(three, tag):
    done = run(KVTOP, "--once", *names(three), PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"GPU-first-{tag} ")
    assert "48.0G of 80.0G" in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == names(three)
    assert max(map(len, lines)) <= 120
    assert not set("▲▼^v") & set(lines[-4]), "nothing is sorted by a column"
    plain = run(KVTOP, "--once", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0
    assert plain.stdout.isascii()


@pytest.mark.parametrize("program", [(KVTOP, "--once"), (KVCTL, "kvtop", "--once"), (KVTOP,)])
def test_unknown_name_is_an_error(owner, program):
    done = run(*program, "no_such_instance")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no segment is called 'no_such_instance'" in done.stderr
    assert owner.name in done.stderr


def test_once_with_an_interval_has_rates(owner):
    row = run(KVTOP, "--once", owner.name, PYTHONIOENCODING="ascii").stdout.splitlines()[-1]
    assert row.split().count("-") == 3  # no rates yet
    later = run(KVTOP, "--once", "-n", "0.1", owner.name, PYTHONIOENCODING="ascii")
    assert later.stdout.splitlines()[-1].split().count("-") == 0


def test_kvctl_kvtop_is_the_same_program(owner):
    done = run(KVCTL, "kvtop", "--refresh", "1", "--once", owner.name)
    assert done.returncode == 0
    assert owner.name in done.stdout


def test_missing_terminal_names_the_once_option():
    done = run(KVTOP)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: kvtop needs a terminal; `kvtop --once` prints one plain screen.\n"
    )
    assert run(KVTOP, "-n", "0").returncode == 2


def test_kvtop_opens_no_gpu(owner):
    program = (
        "import sys; from kvelastic.cli.kvtop.command import main\n"
        f"sys.argv = ['kvtop', '--once', {owner.name!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import kvelastic.cli.kvtop.app\n"
        "print(sorted({'torch', 'cuda', 'pynvml', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('libcuda' in maps, file=sys.stderr)"
    )
    done = run_python("-c", program)
    assert done.stderr.splitlines()[-2:] == ["[]", "False"]
