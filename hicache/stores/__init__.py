"""An engine's interface to the tiers below memory: identity and byte order of pages, and the client of a store."""
