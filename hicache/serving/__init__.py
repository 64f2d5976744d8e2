"""The reference runner and scheduler: long contexts of transformers models served through the three tiers.

Needs the extra `serve`. Nothing below this package imports it.
"""
