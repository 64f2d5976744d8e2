"""The tiers below memory as an engine sees them: identity and byte order of its pages, and the client of their
store."""
