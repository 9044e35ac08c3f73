"""README and docs/ against what is there: links, commands, options, variables, extras, examples."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from waiting import DEADLINE_S

from kvelastic.config import VARIABLES

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")
    if name and "/results/" not in name and not name.startswith("benchmarks/")
]  # fmt: skip
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=IDS)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """Without what stands in fences."""
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@each_page
def test_links_have_existing_targets(page: Path) -> None:
    bad = []
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            bad.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            bad.append(f"{link} (no such heading)")
    assert not bad


def kvctl_words(text: str) -> list[list[str]]:
    """The words after each `kvctl`, without an address, up to what ends a command there."""
    text = re.sub(r"kvctl --address \S+(?= )", "kvctl", text)
    found = re.findall(r"(?<![\w/.-])kvctl((?: +(?:[^\s`#|;&()]|\[|\])+)+)", text)
    return [re.sub(r"[\[\],]", " ", words).split() for words in found]


def command_of(words: list[str]) -> click.Command | None:
    """The command that the first words name; None where they are prose (`kvctl shows ...`)."""
    from kvelastic.cli.kvctl import main as kvctl

    command: click.Command | None = kvctl
    for word in words:
        if not isinstance(command, click.Group):
            break
        inner = command.get_command(click.Context(command), word)
        if inner is None:
            break
        command = inner
    return None if command is kvctl else command


def options_of(command: click.Command) -> set[str]:
    """Of a group also those of its commands: without a name it runs one of them."""
    known = {name for each in command.params for name in [*each.opts, *each.secondary_opts]}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            known |= options_of(inner)
    return known


@each_page
def test_kvctl_commands_and_options_exist(page: Path) -> None:
    bad = []
    text = page.read_text()
    code = "\n".join(
        re.findall(r"^ {4}.*$", text, re.M) + [body for _, body in FENCE.findall(text)]
    )
    for words in kvctl_words(code) + kvctl_words("\n".join(re.findall(r"`([^`\n]+)`", text))):
        if (
            words[0] == "--address" or words[0].isupper() or "/" in words[0]
        ):  # a placeholder; several commands at once
            continue
        command = command_of(words)
        if command is None:
            bad.append("kvctl " + " ".join(words))
            continue
        known = options_of(command)
        bad += [
            f"kvctl {' '.join(words)}: {word}"
            for word in words
            if word.startswith("-") and word.partition("=")[0] not in known | {"--help"}
        ]
    assert not bad


@each_page
def test_scripts_and_their_options_exist(page: Path) -> None:
    bad = []
    for name, rest in re.findall(r"(?<![\w/])scripts/([a-z]+)\b([^`#\n]*)", page.read_text()):
        script = ROOT / "scripts" / name
        if not script.exists():
            bad.append(f"scripts/{name}")
            continue
        sources = [script, *(ROOT / "scripts" / f"_{name}").glob("*.py")]
        if name in {"bench", "gpu"}:
            sources += [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/*/*.py")]
        known = "\n".join(source.read_text() for source in sources)
        if name == "test":
            known += " -k --lf "
        bad += [
            f"scripts/{name} {option}"
            for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)
            if option not in known
        ]
    assert not bad


@each_page
def test_variables_exist(page: Path) -> None:
    known = {variable.name for variable in VARIABLES}
    sources = "\n".join(path.read_text() for path in ROOT.glob("kvelastic/**/*.py"))
    for folder in ("cli", "controller"):
        sources += "\n".join(path.read_text() for path in ROOT.glob(f"{folder}/**/*.py"))
    used = set(re.findall(r"\bKVELASTIC_[A-Z_]*[A-Z]\b", page.read_text()))
    own = {"KVELASTIC_API_KEY", "KVELASTIC_ADMIN_KEY"}  # examples of names that a user chooses
    missing = {name for name in used - known - own if name not in sources}
    built = (ROOT / "CMakeLists.txt").read_text()
    assert {name for name in missing if name not in built} == set()


@each_page
def test_extras_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"\[project\.optional-dependencies\](.*?)\n\[project", project, re.S)
    assert extras is not None
    known = set(re.findall(r"^(\w+) = \[", extras.group(1), re.M))
    named = re.findall(r"(?:kvelastic|\.)\[([\w,]+)\]'", text)
    assert {extra for names in named for extra in names.split(",")} <= known
    modules = set(re.findall(r"python3? -m (kvelastic[\w.]*)", text))
    assert {module for module in modules if importlib.util.find_spec(module) is None} == set()


@each_page
def test_examples_can_be_parsed(page: Path) -> None:
    """Python, JSON and YAML; README's Python example runs in tests/packaging."""
    for language, body in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(body)
        elif language == "json":
            json.loads(body)
        elif language in {"yaml", "yml"}:
            yaml.safe_load(body)


@each_page
def test_mentioned_files_exist(page: Path) -> None:
    ours = r"benchmarks|cli|controller|docker|docs|examples|kvelastic|scripts|tests|tools|vmm_csrc"
    named = re.findall(rf"`((?:{ours})/[\w./-]*\w)`", prose(page.read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert [name for name in missing if not list(ROOT.glob(f"{name}.*"))] == []


def check(config: str, folder: Path) -> None:
    path = folder / "controller.yaml"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "kvelastic.controller", "--config", str(path), "--check"],
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        env={"PATH": "", "KVELASTIC_API_KEY": "a" * 32, "KVELASTIC_ADMIN_KEY": "b" * 32},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_controller_accepts_the_readme_configuration(tmp_path: Path) -> None:
    found = re.search(r"echo '(.*)' >controller.yaml", (ROOT / "README.md").read_text())
    assert found is not None
    check(found.group(1), tmp_path)


@pytest.mark.slow
def test_controller_accepts_the_compose_configuration(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    check(compose["configs"]["controller"]["content"].replace("$$", "$"), tmp_path)


def test_compose_file_shares_ipc_pid_and_ports() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    controller = yaml.safe_load(compose["configs"]["controller"]["content"])
    names = {
        service["environment"].get("KVELASTIC_IPC_NAME") for service in compose["services"].values()
    }
    for service in compose["services"].values():
        assert (service["ipc"], service["pid"]) == ("host", "host")
    for model in controller["models"]:
        assert model["instance"] in names
        port = model["url"].rsplit(":", 1)[1]
        assert f"--port {port}" in compose["services"][model["name"]]["command"]


def test_image_copies_the_build_inputs() -> None:
    """The same as `pip install .` reads, and nothing that .dockerignore leaves out."""
    kept = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split("\n")
    for need in ("CMakeLists.txt", "pyproject.toml", "vmm_csrc", "startup_files", "README.md"):
        assert f"!{need}" in kept
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    engines = re.search(r"^ARG ENGINE=vllm/vllm-openai:v(\d+\.\d+)", dockerfile, re.M)
    assert engines is not None
    from kvelastic.engines import ENGINES

    [vllm] = [engine for engine in ENGINES if engine.name == "vllm"]
    assert any(series.startswith(engines.group(1)) for series in vllm.tried)


def test_checked_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/vllm.md", "docs/operators.md"} <= set(IDS)
