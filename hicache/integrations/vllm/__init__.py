"""Plug-ins for vLLM."""
