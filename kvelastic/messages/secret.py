"""The secret that peers on TCP share: a file that only this user can read.

    python -c 'import secrets; print(secrets.token_hex(32))' >secret; chmod 600 secret

Each line is a secret. This process proves the first one to its peers, and accepts each of them. So
a secret can be replaced without a restart: first add the new secret as the last line on every host,
then make it the first line on every host, then remove the old one. The file is read for each new
connection; open connections are not affected.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvelastic.errors import SecretError

_MOST_FILE_BYTES: Final = 4096
_LEAST_CHARACTERS: Final = 32
"""A shorter secret could be guessed from recorded traffic."""
_MOST_SECRETS: Final = 8


class SecretFile:
    """Reads the secrets from the file on each call. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Check the file; raises `SecretError` if it is not usable now."""
        self.path: Final = path
        self.secrets()

    def secrets(self) -> list[bytes]:
        """Return the secrets; the first is the one to prove.

        Raises `SecretError` if the file does not exist, belongs to another user, is accessible to
        other users, has a line of fewer than 32 characters, or does not have one to eight secrets.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SecretError(f"cannot read the secret: {error}; name another file") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise SecretError(f"{self.path} is no file; name another one")
            if found.st_uid != os.geteuid():
                raise SecretError(
                    f"{self.path} belongs to user {found.st_uid}; use a file of your own"
                )
            if found.st_mode & 0o077:
                raise SecretError(
                    f"others can use {self.path} (mode {stat.S_IMODE(found.st_mode):04o});"
                    f" chmod 600 {self.path}"
                )
            raw = os.read(fd, _MOST_FILE_BYTES + 1)
        finally:
            os.close(fd)
        if len(raw) > _MOST_FILE_BYTES:
            raise SecretError(f"{self.path} is larger than {_MOST_FILE_BYTES} bytes")
        secrets = [line.strip() for line in raw.split(b"\n") if line.strip()]
        if not 0 < len(secrets) <= _MOST_SECRETS:
            raise SecretError(
                f"{self.path} has {len(secrets)} secrets; write 1 to {_MOST_SECRETS}, one a line"
            )
        if any(len(secret) < _LEAST_CHARACTERS for secret in secrets):
            raise SecretError(
                f"a secret in {self.path} is shorter than {_LEAST_CHARACTERS} characters;"
                " make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        return secrets
