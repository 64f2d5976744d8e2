"""The movements of pages between tiers, one file each. The engine starts them and applies their results."""
