"""A request on its way to an engine."""
