"""The served models, by name and alias. A reload changes them while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote

from kvelastic.controller.http.refusal import Refusal, unknown_model
from kvelastic.controller.models.served_model import ServedModel


class Fleet:
    """The served models. Use it in the event loop."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> ServedModel | None:
        """Return the model with this name or alias, or None."""
        return self._names.get(name)

    def need(self, name: str) -> ServedModel:
        """Return the model with this name or alias from a path. Raises `Refusal` (404).

        In the client's request the name may be percent-encoded once, twice, or not at all.
        """
        for candidate in (name, unquote(name)):
            model = self._names.get(candidate)
            if model is not None:
                return model
        raise unknown_model(name)

    def put(self, models: list[ServedModel]) -> list[ServedModel]:
        """Replace the served models; return the models that are no longer served."""
        old = list(self._models.values())
        self._models = {model.name: model for model in models}
        self._names = {
            name: model for model in models for name in (model.name, *model.settings.aliases)
        }
        return [model for model in old if model not in models]


NOT_SERVED = Refusal(503, "model_removed", "This model is no longer served here.", 5.0)
SHUTTING_DOWN = Refusal(503, "shutting_down", "The controller is ending; try again later.", 5.0)
