"""A strict YAML reader. Its errors give a fault's position, never the text there.

A line of a configuration may contain a secret. So may a parser's own message, which quotes aliases,
tags and numbers. So the parser's message only selects one of this module's messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import yaml

_EXPECTED: Final = (
    ("is there twice", "a key that is there twice; write it once"),
    ("mapping values are not allowed", "a value with `: ` in it, or a line too far to the right"),
    ("found unexpected end of stream", "a quote that is not closed"),
    ("found unknown escape character", "a backslash in double quotes that escapes nothing"),
    ("that cannot start any token", "a value that begins with this character has to be quoted"),
    ("found undefined alias", "a value that begins with * has to be quoted"),
    ("second occurrence", "a value that begins with & has to be quoted"),
    ("a constructor for the tag", "a value that begins with ! has to be quoted"),
    ("found undefined tag handle", "a value that begins with ! has to be quoted"),
    ("could not find expected ':'", "a key needs a colon after it"),
    ("expected <block end>", "this line does not fit those above; look at its indentation"),
    ("expected ',' or ']'", "a list needs a comma between its items, and a ] at its end"),
    ("expected ',' or '}'", "a mapping needs a comma between its items, and a } at its end"),
    ("expected the node content", "a value is expected"),
    ("found unhashable key", "a key has to be a word"),
    ("refers to itself", "an alias (*) must not stand within its own anchor (&)"),
    ("is too much", "more than 10,000 values, with what aliases (*) stand for"),
    ("is too deep", "it is nested too deep"),
    ("is no value", "a number or a date that cannot be one; quote it if it is text"),
)
_MOST_VALUES: Final = 10_000
_MOST_DEPTH: Final = 50
_NUMBERS: Final = frozenset(("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"))
_NUMBER_CHARS: Final = 64
_UNNAMED: Final = "it cannot be read from here on"


class YamlFaultError(ValueError):
    """A text is not valid YAML. The message has the position and the expected syntax."""


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises `YamlFaultError`, which quotes none of the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or ""
        expected = next((ours for theirs, ours in _EXPECTED if theirs in problem), _UNNAMED)
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise YamlFaultError(f"{where}{expected}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFaultError(
            f"line {line}: a character that YAML does not allow (U+{_code(error):04X})"
        ) from None


def _fault(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def _code(error: yaml.reader.ReaderError) -> int:
    return error.character if isinstance(error.character, int) else ord(error.character)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, because the wrong one of two limits could apply.

    It also refuses more than `_MOST_VALUES` values, counted with aliases expanded: ten lines of ten
    aliases each expand to 10^10 values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """Number of values of each complete node, by the node's `id()`."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._values
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise _fault("refers to itself", event)
            self._values += self._sizes[id(node)]
        else:
            self._values += 1
            self._depth += 1
            if self._depth > _MOST_DEPTH:
                raise _fault("is too deep", event)
            node = super().compose_node(parent, index)
            self._depth -= 1
            self._sizes[id(node)] = self._values - before
        if self._values > _MOST_VALUES:
            raise _fault("is too much", event)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            # Numbers to base 60 (1:1:1) take quadratic time.
            if node.tag in _NUMBERS and len(node.value) > _NUMBER_CHARS:
                raise ValueError
            return super().construct_object(node, deep=deep)
        except yaml.YAMLError:
            raise
        except Exception:  # from int(), float() or a lookup; its message quotes the value
            raise _fault("is no value", node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = "found unhashable key" if not isinstance(key, Hashable) else ""
            if not problem and key in seen:
                problem = "is there twice"
            if problem:
                raise _fault(problem, key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
