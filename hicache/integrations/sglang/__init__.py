"""Plug-ins for SGLang."""
