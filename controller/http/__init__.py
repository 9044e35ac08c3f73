"""HTTP below the routes: connections, bounded bodies, headers, keys."""
