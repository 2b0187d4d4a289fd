"""One generation request: what a route asks for, its preparation, and its output."""
