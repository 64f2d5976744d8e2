"""A stand-in for the package mooncake-transfer-engine."""
