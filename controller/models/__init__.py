"""The models that are served: gates, sleep, memory, swap."""
