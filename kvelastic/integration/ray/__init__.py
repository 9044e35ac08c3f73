"""kvelastic under Ray Serve: engines on several machines behind one OpenAI address.

    serve run kvelastic.integration.ray.app:build models=...        # or Serve's YAML file
    serve.run(build({"models": [...]}))                             # in a program

`KvFront` reads the model's name, `KvRouter` chooses a replica, and `KvEngine` runs one engine with
kvelastic. A replica is the controller of one model without its HTTP server: gate, sleep and launch
are the controller's. Only `app`, `engine`, `front` and `router` import Ray. docs/cluster.md has the
configuration.
"""
