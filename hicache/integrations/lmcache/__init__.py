"""Plug-ins for LMCache."""
