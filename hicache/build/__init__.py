"""Builds an engine from its configuration: its sizes, its pools and its stores."""
