"""The HTTP front over several instances; installed as `kvelastic.controller`.

`front.Front` holds everything, `application` is its ASGI face, `server.run` the whole program. It
speaks to instances through segments, ledgers and HTTP only, and needs `kvelastic[controller]`.
"""
