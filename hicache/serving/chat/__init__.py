"""`hicache chat`: answers questions about files, and shows which tiers had the tokens of each prompt."""
