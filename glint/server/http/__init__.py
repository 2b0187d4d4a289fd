"""HTTP/1.1 under the routes: connections, bodies, hosts and error responses."""
