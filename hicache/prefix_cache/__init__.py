"""SGLang's prefix caches, their value objects, and allocation for whole batches, under SGLang's names."""
