"""The prefix caches, their parameters and results, and allocation for batches, under SGLang's names."""
