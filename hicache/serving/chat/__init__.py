"""`hicache chat`: questions about files, with the tiers that each prompt's tokens came from."""
