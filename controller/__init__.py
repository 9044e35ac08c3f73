"""The REST controller of several instances; installed as `kvelastic.controller`.

`app_state.AppState` holds everything, `application` is the ASGI application, `server.run` the whole
program. It speaks to instances through segments, ledgers and HTTP only, and needs
`kvelastic[controller]`.
"""
