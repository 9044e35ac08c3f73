"""Makes `import flexkv` import `kvelastic.flexkv`, unless FlexKV itself is installed.

    from kvelastic.flexkv import alias
    alias.switch_on()

    KVELASTIC_FLEXKV_ALIAS=true vllm serve ...    # in every Python process, from its start

The alias is off by default, and no package named flexkv is installed. A module is the same object
under both names, so its classes are identical. An installed FlexKV has precedence.
"""

from __future__ import annotations

import importlib
from typing import Final

from kvelastic.import_alias import ImportAlias

_ALIAS: Final = ImportAlias("flexkv", lambda name: importlib.import_module(f"kvelastic.{name}"))
switch_on = _ALIAS.switch_on
switch_off = _ALIAS.switch_off
