"""Movements of pages between tiers, one movement in each file. The engine starts the movements and applies their
results."""
