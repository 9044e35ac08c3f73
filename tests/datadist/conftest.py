"""The sockets of links lie in a folder of the run's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_folder_of_sockets(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield
