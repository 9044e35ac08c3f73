"""Objects that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

_T = TypeVar("_T", bound="Closing")


class Closing(ABC):
    """Base of classes whose context manager only closes them."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
