"""Monitors a server from another process: reads the figures of its `/metrics`, and shows them in `hicache top`."""
