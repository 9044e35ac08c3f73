"""The secret that peers on TCP share: a file of this user that nobody else can read.

    python -c 'import secrets; print(secrets.token_hex(32))' >secret; chmod 600 secret

Each line is a secret. The first is the one that this process proves to others, and every line lets
others in, so a secret is replaced with no restart: add the new one as the last line everywhere,
then make it the first everywhere, then remove the old one. The file is read for each connection;
connections that stand go on.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvelastic.errors import SecretError

_MOST_FILE_BYTES: Final = 4096
_LEAST_CHARACTERS: Final = 32
"""What is short can be guessed from what an eavesdropper sees."""
_MOST_SECRETS: Final = 8


class SecretFile:
    """Reads the secrets anew each time; any thread may ask."""

    def __init__(self, path: Path) -> None:
        """Raises `SecretError` at once if the file is not usable now."""
        self.path: Final = path
        self.secrets()

    def secrets(self) -> list[bytes]:
        """All of them, the one to prove first.

        Raises `SecretError` if the file is not there, is not this user's, can be read or written
        by others, or has a line of fewer than 32 characters or more than eight lines.
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
