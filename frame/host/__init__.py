"""What a process asks its host: memory and installed packages."""
