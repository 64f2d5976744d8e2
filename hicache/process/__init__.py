"""Process-wide duties of a command: log lines that never block the command, and the duties of process 1 of a
container."""
