"""`hicache chat`: questions about files, and which tier had each prompt."""
