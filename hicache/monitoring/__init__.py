"""Monitoring a server from another process: the figures of its `/metrics`, and `hicache top`, which shows them."""
