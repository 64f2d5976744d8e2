"""The page table: rows of pages, their states on each tier, the tree of prefixes, and the eviction orders."""
