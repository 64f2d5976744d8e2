"""Process-wide duties of a command: log lines that never block it, and the work of process 1 of a container."""
