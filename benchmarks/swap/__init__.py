"""How long a client waits whose model takes another one's place."""
