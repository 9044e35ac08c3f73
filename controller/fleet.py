"""The models that are served, by name and alias; they change while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote

from kvelastic.controller.refusal import Refusal, unknown_model
from kvelastic.controller.served_model import ServedModel


class Fleet:
    """Owned by the loop."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> ServedModel | None:
        """By name or alias."""
        return self._names.get(name)

    def need(self, name: str) -> ServedModel:
        """By name or alias, as a path has it: encoded, twice encoded, or not. Raises `Refusal`."""
        for candidate in (name, unquote(name)):
            model = self._names.get(candidate)
            if model is not None:
                return model
        raise unknown_model(name)

    def put(self, models: list[ServedModel]) -> list[ServedModel]:
        """Serve these from now on; returns those that are no longer served."""
        old = list(self._models.values())
        self._models = {model.name: model for model in models}
        self._names = {
            name: model for model in models for name in (model.name, *model.settings.aliases)
        }
        return [model for model in old if model not in models]


NOT_SERVED = Refusal(503, "model_removed", "This model is no longer served here.", 5.0)
SHUTTING_DOWN = Refusal(503, "shutting_down", "The controller is ending; try again later.", 5.0)
