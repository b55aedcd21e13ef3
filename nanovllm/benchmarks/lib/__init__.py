"""How a benchmark talks to a server."""
