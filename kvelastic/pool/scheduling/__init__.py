"""What all engines' schedulers share: pool sessions, steps in flight, and backoff.

The integrations build on it. It imports neither torch nor an engine.
"""
