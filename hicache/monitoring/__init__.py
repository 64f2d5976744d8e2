"""Watching a server from outside: the figures of its `/metrics`."""
