"""One server for several engines of a machine, and its clients: FlexKV's, over Unix sockets."""
