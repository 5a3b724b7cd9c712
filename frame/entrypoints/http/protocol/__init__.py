"""HTTP below the routes: listeners, connections, bodies, routing and access."""
