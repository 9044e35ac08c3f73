"""The current state of the controller: settings, models, keys. A reload replaces the parts.

Use it in the event loop. `Front` owns and changes it; forwarding and the maintenance loop read it.
"""

from __future__ import annotations

import time

from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.models.fleet import Fleet
from kvelastic.controller.models.memory_history import MemoryHistory
from kvelastic.controller.settings.settings import Settings


class Serving:
    """The current settings, models and keys, shared by the parts of the controller."""

    def __init__(self, settings: Settings, files: OpenFiles) -> None:
        self.settings = settings
        self.origins = Origins(settings.server)
        self.keys = Keys(settings.auth, self.origins)
        self.fleet = Fleet()
        self.files = files
        self.memory_history = MemoryHistory()
        self.started_at = time.time()
        self.unrouted = 0
        """Number of requests without a served model."""
