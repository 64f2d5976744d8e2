"""Which page is where: the rows of the page table, their states, and the order in which they are evicted."""
