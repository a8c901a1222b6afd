"""Serve a policy over websockets and HTTP, and ask such a server (README.md)."""
