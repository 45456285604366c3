"""HTTP: connections, TLS, framing, bodies, routes and the ASGI application."""
