"""`_vmm.pyi` declares what the native module has: each name, and the parameters of each function.

nanobind's own generator reads the module. Types are not compared: the stub's are more precise.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nanobind.stubgen import StubGen

from kvelastic import _vmm

STUB = Path(__file__).parents[2] / "kvelastic" / "_vmm.pyi"

Parameters = tuple[int, tuple[str, ...], tuple[str, ...], int, int]


def parameters(function: ast.FunctionDef) -> Parameters:
    """How many by position only, the names of the others, those by name only, and the defaults."""
    given = function.args
    by_position = len(given.posonlyargs)
    if by_position == 0 and given.args and given.args[0].arg == "self":
        by_position = 1
    names = [one.arg for one in given.posonlyargs + given.args][by_position:]
    by_name = [one.arg for one in given.kwonlyargs]
    optional = sum(default is not None for default in given.kw_defaults)
    return by_position, tuple(names), tuple(by_name), len(given.defaults), optional


def declared(text: str) -> dict[str, set[Parameters | str]]:
    """Each name of a stub, with the parameters of what can be called. Typed dicts are no names."""
    found: dict[str, set[Parameters | str]] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                if "TypedDict" not in [ast.unparse(base) for base in node.bases]:
                    found[prefix + node.name] = {"class"}
                    add(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                found.setdefault(prefix + node.name, set()).add(parameters(node))
            elif isinstance(node, ast.AnnAssign):
                found[prefix + ast.unparse(node.target)] = {"value"}

    add(ast.parse(text).body, "")
    # Private functions are the tests' own, and the generator leaves them out.
    return {name: what for name, what in found.items() if "._" not in name or "__" in name}


def generated() -> str:
    made = StubGen(_vmm, quiet=True, include_docstrings=False)
    made.put(_vmm)
    # Python cannot name a parameter `from`, so the stub has it by position only.
    return re.sub(r"\bfrom: (\w+), to: (\w+)\)", r"a: \1, b: \2, /)", str(made.get()))


def test_stub_matches_the_module() -> None:
    ours, native = declared(STUB.read_text()), declared(generated())
    assert len(native) > 300
    assert set(ours) == set(native)
    different = {name: (ours[name], native[name]) for name in ours if ours[name] != native[name]}
    assert different == {}
