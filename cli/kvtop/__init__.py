"""kvtop: the devices and instances of this machine on one screen, and their limits at a key.

What is on it is computed with no terminal: `scene` (values as found), `model` (rates, history),
`view` (lines of styled text) and `keys` (what a key does). `app` alone knows a terminal.
"""
