"""`frame bench`: seeded workloads, what runs them (an engine in this process, a server from
outside), and what is made of the times."""
