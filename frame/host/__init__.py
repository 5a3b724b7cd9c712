"""What a process asks its host for: memory, installed packages, a private folder of sockets."""
