"""Reads signatures of functions and fields of classes from a folder, without importing it.

signature(Path("site-packages"), "vllm.v1.core.block_pool:BlockPool.touch") -> "(self, blocks)"
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@lru_cache(maxsize=2)  # names come sorted, so of each side the last module is enough
def _module(path: Path) -> ast.Module | None:
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text())
    return None


def _find(body: list[ast.stmt], name: str) -> ast.AST | None:
    for node in body:
        if isinstance(node, _DEFINED) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node
        if isinstance(node, ast.If | ast.Try):
            found = _find([*node.body, *node.orelse], name)
            if found is not None:
                return found
    return None


def _fields(node: ast.ClassDef) -> str:
    names = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)
             and isinstance(each.target, ast.Name)]  # fmt: skip
    made = _find(node.body, "__init__")
    if isinstance(made, ast.FunctionDef):
        return f"__init__({ast.unparse(made.args)})"
    return f"fields: {', '.join(names)}"


def signature(packages: Path, name: str) -> str | None:
    """Return the signature of `module:Name.attribute`; None if it is undefined or inherited."""
    module, _, path = name.partition(":")
    tree = _module(packages / module.replace(".", "/"))
    if tree is None:
        return None
    node: ast.AST | None = tree
    for part in path.split("."):
        if not isinstance(node, ast.Module | ast.ClassDef):
            return None
        node = _find(node.body, part)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        return _fields(node)
    return None if node is None else ast.unparse(node)
