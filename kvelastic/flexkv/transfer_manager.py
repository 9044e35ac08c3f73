"""A name that SGLang's connector imports for ranks on further nodes, which are unsupported."""

from __future__ import annotations

from typing import Any, NoReturn

from kvelastic.errors import UnsupportedError


class TransferManagerOnRemote:
    """FlexKV's process on a further node. Not supported."""

    @classmethod
    def create_process(cls, *arguments: Any, **named: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(
            "ranks of one model on several machines are not served; run one instance a machine and"
            " share what they keep by enable_remote"
        )
