"""`hicache chat`: ask questions about files, and show which tiers had the tokens of each prompt."""
