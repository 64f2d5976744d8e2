"""What a process owes to whoever runs it: logs that somebody may read."""
