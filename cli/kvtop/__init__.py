"""kvtop: shows the devices and instances of this machine on one screen, with keys to set limits.

The modules that compute the screen need no terminal: `scene` (values read), `model` (rates,
history), `view` (lines of styled text) and `keys` (effects of keys). Only `app` uses a terminal.
"""
