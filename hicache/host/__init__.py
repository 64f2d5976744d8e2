"""The host tier: pinned CPU memory in pages."""
