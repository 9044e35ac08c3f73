"""FlexKV's process for ranks on further nodes, which is refused: one node is served."""

from __future__ import annotations

from typing import Any, NoReturn

from kvelastic.errors import UnsupportedError


class TransferManagerOnRemote:
    """See the module."""

    @classmethod
    def create_process(cls, *arguments: Any, **named: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(
            "ranks of one model on several machines are not served; run one instance a machine and"
            " share what they keep by enable_remote"
        )
