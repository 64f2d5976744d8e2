"""Watching a server from outside: the figures of its `/metrics`, and `hicache top`, which shows them."""
