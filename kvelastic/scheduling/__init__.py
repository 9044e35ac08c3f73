"""What every engine's scheduler does with a pool: sessions, steps on their way, naps.

Each of the integrations stands on these. They know neither torch nor an engine.
"""
