"""The reference scheduler and model runner: transformers models with long contexts, served through the three tiers.

Needs the extra `serve`. No other package imports this one.
"""
