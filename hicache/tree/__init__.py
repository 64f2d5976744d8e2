"""Which prefix is where: the radix tree over token pages, its components, its page keys and its accounts."""
