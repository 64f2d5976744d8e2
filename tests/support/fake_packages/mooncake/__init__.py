"""Stands in for the package mooncake-transfer-engine."""
