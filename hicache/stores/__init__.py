"""The tiers below memory from an engine's view: identity and byte order of pages, and the client of a store."""
