"""What a process owes to whoever runs it: logs that somebody may read, and the work of process 1 of a container."""
