"""One instance, read once for every surface: what it is, and what came of a request to it."""
