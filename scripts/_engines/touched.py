"""Lists the names of an engine that its integration uses, from the integration's sources.

    touched("vllm") -> ["vllm.v1.core.block_pool:BlockPool.touch", ...]

The integrations name everything as `module:Name.attribute` in probes and hooks. These texts are
collected, with the names of constants in f-strings substituted.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

INTEGRATIONS = Path(__file__).parents[2] / "kvelastic" / "integration"


def _constants(trees: list[ast.Module]) -> dict[str, str]:
    """Return the texts that constants of modules have, with those in f-strings substituted."""
    found: dict[str, str] = {}
    # Once for each level of f-strings in f-strings: modules may come before those they import.
    for _ in range(4):
        for node in (node for tree in trees for node in tree.body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                names = node.targets if isinstance(node, ast.Assign) else [node.target]
                text = _text(node.value, found)
                if text is not None:
                    found |= {each.id: text for each in names if isinstance(each, ast.Name)}
    return found


def _text(node: ast.AST, constants: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            known = constants.get(inner.id) if isinstance(inner, ast.Name) else None
            text = known if known is not None else _text(inner, constants)
            if text is None:
                return None
            parts.append(text)
        return "".join(parts)
    return None


def touched(engine: str) -> list[str]:
    """Return every `module:Name.attribute` of the engine that its integration names, sorted."""
    trees = [ast.parse(path.read_text()) for path in sorted((INTEGRATIONS / engine).glob("*.py"))]
    constants = _constants(trees)
    # A text is one name, or requirements, of which each begins a line with a name.
    pattern = re.compile(rf"^{engine}(?:\.\w+)*:\w+(?:\.\w+)*(?=[( \n]|\Z)", re.MULTILINE)
    texts = (_text(node, constants) for tree in trees for node in ast.walk(tree))
    return sorted({name for text in texts if text is not None for name in pattern.findall(text)})
