"""Tier 2: pinned CPU memory in pages."""
