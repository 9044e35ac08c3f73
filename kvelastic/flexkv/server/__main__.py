"""`python -m kvelastic.flexkv.server`."""

import sys

from kvelastic.flexkv.server.program import main

sys.exit(main(sys.argv[1:]))
