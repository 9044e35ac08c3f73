"""One table knows the engines: another one is a row and a folder, and nothing else."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvelastic import engines
from kvelastic.doctor.facts import Facts, PackageFacts
from kvelastic.doctor.judge import judge
from kvelastic.engines import Engine
from kvelastic.errors import InvalidArgumentError, UnsupportedEngineError, UnsupportedError
from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import require
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_series, series_for
from kvelastic.kvcached import embedded
from kvelastic.pool.tensor_views import BlocksOfShape, plan
from kvelastic.shared import segment

ROOT = Path(__file__).parents[2]
NAMES = {name for engine in engines.ENGINES for name in (engine.name, engine.title)}


class ToyShapes(ModuleType):
    """What `kvelastic/integration/toy/shapes.py` would be."""

    ATTENTION_TYPES = ("MHA",)
    BLOCK_SIZE = "tokens"
    HYBRID_ADVICE = "Use another engine."

    @staticmethod
    def accepted(attention_type: str) -> str:
        return "(blocks, tokens, bytes)"

    @staticmethod
    def read(shape: tuple[int, ...], attention_type: str, block_size: int) -> BlocksOfShape | None:
        return BlocksOfShape("latent", shape[0], shape[1:], shape[1]) if len(shape) == 3 else None


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One more row of the table, and its folder."""
    engine = Engine("toy", "Toy")
    monkeypatch.setattr(engines, "ENGINES", (*engines.ENGINES, engine))
    monkeypatch.setattr("kvelastic.doctor.judge_engines.ENGINES", engines.ENGINES)
    folder = "kvelastic.integration.toy"
    monkeypatch.setitem(sys.modules, folder, ModuleType(folder))
    monkeypatch.setitem(sys.modules, f"{folder}.shapes", ToyShapes(f"{folder}.shapes"))
    return engine


def test_new_engine_needs_only_a_row_and_folder(toy: Engine) -> None:
    small: dict[str, Any] = {"block_size": 4, "itemsize": 2, "num_layers": 3}
    made = plan((10, 4, 32), engine="toy", **small)
    assert (made.form, made.num_blocks, made.layout.buffers) == ("latent", 10, 3)
    with pytest.raises(ValueError, match=r"for toy and MHA; it must be \(blocks, tokens, bytes\)"):
        plan((10, 4), engine="toy", **small)
    with pytest.raises(UnsupportedError, match=r"accepted are MHA\. Use another engine\.$"):
        plan((10, 4, 32), engine="toy", **small, attention_type="MAMBA")
    with pytest.raises(InvalidArgumentError, match="must be vllm or sglang or toy"):
        plan((10, 4, 32), engine="other", **small)
    facts = Facts(packages=PackageFacts(versions=(("toy", "1.0"),)))
    (finding,) = [one for one in judge(facts) if one.check == "engines.toy"]
    assert finding.what == "Toy 1.0: kvelastic does not support its processes yet"
    assert "kvelastic.integration.toy.interfaces" in finding.do


def test_instances_carry_the_engine_name(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "64M")
    embedded.init("toy", tp_rank=0, world_size=1, pp_rank=0, device="cpu")
    try:
        embedded.alloc_kv_cache(
            (10, 4, 32),
            block_size=4,
            dtype=torch.float16,
            device="cpu",
            num_layers=3,
            attention_type="MHA",
            kv_layout="NHD",
            group_id=0,
        )
        mine = [info for info in segment.list_segments() if info.header.get("engine") == "Toy"]
        assert len(mine) == 1
    finally:
        embedded.shutdown_kvelastic()


def test_core_code_names_no_engine() -> None:
    """But in texts: what a comment, a docstring or a message says of one is no dependency."""
    folder = ROOT / "kvelastic"
    core = [*folder.glob("*.py")]
    for inner in ("device", "shared", "pool", "instance", "doctor"):
        core += (folder / inner).rglob("*.py")
    assert len(core) > 60
    found = []
    for path in core:
        if path.name == "engines.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            said = node.value if isinstance(node, ast.Constant) else None
            if isinstance(said, str) and said in NAMES:
                found.append(f"{path.name}: {said}")
            for key in ("id", "attr", "arg", "name"):
                name = getattr(node, key, None)
                if isinstance(name, str) and any(
                    one.name in name.lower() for one in engines.ENGINES
                ):
                    found.append(f"{path.name}: {name}")
    assert found == []


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_every_engine_row_has_a_folder(engine: Engine) -> None:
    folder = ROOT / "kvelastic" / "integration" / engine.name
    assert (folder / "interfaces.py").is_file() == engine.has_interfaces
    if engine.has_interfaces:
        shapes = engine.shapes()
        for attention_type in shapes.ATTENTION_TYPES:
            assert shapes.accepted(attention_type)
    assert bool(engine.plugin_group) == bool(engine.plugins_variable)
    # An engine loads plugins, or is loaded by its import; one that is not hooked has neither.
    assert bool(engine.plugin_group) + bool(engine.loaded_by) == bool(engine.tried)
    if engine.tried:
        assert callable(engine.plugin().register)
    if engine.loaded_by:
        assert engine.loading_module.partition(".")[0] == engine.name
        assert engine.loading_class.isidentifier()


def test_every_engine_folder_has_a_row() -> None:
    made = (ROOT / "kvelastic" / "integration").glob("*/__init__.py")
    folders = {path.parent.name for path in made}
    # Ray Serve runs engines, and is none.
    assert folders - {"hooks", "ray"} == {engine.name for engine in engines.ENGINES}


def test_engine_without_kvcached_functions_is_rejected() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'transformers'.* must be vllm or sglang\.$"):
        plan((10, 4, 32), engine="transformers", block_size=4, itemsize=2, num_layers=3)


TABLE = ("0.9", "0.31", "0.40")


@pytest.mark.parametrize(
    ("version", "strict", "series"),
    [
        ("0.31.7", True, "0.31"),
        ("0.31.7", None, "0.31"),
        ("0.31.7", False, "0.31"),
        # A newer release of the same major version: only an explicit `true` refuses it.
        ("0.41.0", True, None),
        ("0.41.0", None, "0.40"),
        ("0.41.0rc1", None, "0.40"),
        ("0.41", False, "0.40"),
        # Between two tested releases, before them, or after a change of the major version.
        ("0.32.0+cpu", None, None),
        ("0.32.0+cpu", False, "0.31"),
        ("0.8.5", None, None),
        ("0.8.5", False, "0.9"),
        ("1.0", None, None),
        ("1.0", False, "0.40"),
        ("nonsense", None, None),
        ("", None, None),
    ],
)
def test_which_series_a_version_is_served_as(
    version: str, strict: bool | None, series: str | None
) -> None:
    toy = Engine("toy", "Toy", tried=TABLE)
    assert engines.served_as(TABLE, version, strict=strict) == series
    if series is not None:
        assert series_for(toy, version, strict=strict) == series
        return
    way_out = "unset KVELASTIC_STRICT" if strict and version else "KVELASTIC_STRICT=false"
    with pytest.raises(UnsupportedEngineError, match=r"0\.9\.x, 0\.31\.x, 0\.40\.x") as refused:
        series_for(toy, version, strict=strict)
    assert way_out in str(refused.value)


def test_releases_of_an_engine_that_changes_between_patches() -> None:
    table = ("0.5.23",)
    assert engines.served_as(table, "0.5.24", strict=None) == "0.5.23"
    assert engines.served_as(table, "0.6", strict=None) == "0.5.23"
    assert engines.served_as(table, "0.5.22", strict=None) is None
    assert engines.served_as((), "1.0", strict=None) is None


@pytest.fixture
def newer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Makes an engine's package, a release after the tested one, with this scheduler."""

    def make(scheduler: str) -> None:
        package = tmp_path / "laterengine"
        package.mkdir()
        package.joinpath("__init__.py").write_text('__version__ = "1.5.0"\n')
        package.joinpath("scheduler.py").write_text(scheduler)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(engines, "ENGINES", (Engine("laterengine", "Later", tried=("1.4",)),))
        monkeypatch.setattr(table, "_entered", set())

    yield make
    for name in [name for name in sys.modules if name.startswith("laterengine")]:
        del sys.modules[name]


SCHEDULER = "laterengine.scheduler"


def arm_in(strict: bool | None) -> None:
    """Do what a plugin does, with one hook and its probe."""
    version = f"Later {installed_series('laterengine', strict=strict)}"

    def probe() -> None:
        require(version, f"{SCHEDULER}:Scheduler.schedule(self requests)", page="docs/later.md")

    wrapper = Hook(
        SCHEDULER,
        f"{SCHEDULER}:Scheduler.schedule",
        lambda original, self, requests: ["wrapped", *original(self, requests)],
    )
    table.arm(version, [wrapper], {SCHEDULER: probe})


def test_newer_release_with_a_clean_probe_runs(
    newer_engine: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    newer_engine(
        "class Scheduler:\n    def schedule(self, requests, more=1):\n        return requests\n"
    )
    with pytest.raises(UnsupportedEngineError, match="unset KVELASTIC_STRICT"):
        arm_in(strict=True)
    arm_in(strict=None)
    assert importlib.import_module(SCHEDULER).Scheduler().schedule([1]) == ["wrapped", 1]
    (line,) = [record.getMessage() for record in caplog.records if "1.5.0" in record.getMessage()]
    assert "tried with Later 1.4.x" in line
    assert "KVELASTIC_STRICT=true" in line


def test_newer_release_with_a_failed_probe_is_refused(
    newer_engine: Callable[[str], None],
) -> None:
    newer_engine("class Scheduler:\n    def schedule(self):\n        return []\n")
    arm_in(strict=None)
    with pytest.raises(UnsupportedEngineError, match=r"expected parameters .*'requests'"):
        importlib.import_module(SCHEDULER)
    assert SCHEDULER not in sys.modules


def test_the_page_of_vllm_counts_the_wrapped_functions() -> None:
    patches = importlib.import_module("kvelastic.integration.vllm.patches")
    page = (ROOT / "docs" / "vllm.md").read_text()
    both = len(patches.HOOKS), len(patches.TIER_HOOKS)
    assert "It wraps {} functions of vLLM, and {} more".format(*both) in page
