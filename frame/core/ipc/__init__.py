"""Inter-process communication: transports of messages, and files that survive a process."""
