"""Transfers of pages between tiers, one transfer in each file. The engine starts the transfers and applies their
results."""
