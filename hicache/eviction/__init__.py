"""What is evicted next: orders over records, and policies by name. Knows nothing of trees, pages or tiers."""
