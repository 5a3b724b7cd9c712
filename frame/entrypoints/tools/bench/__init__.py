"""`frame bench`: seeded workloads, clients that run them (an engine in this process, or a server
over HTTP) and reports of the measured times."""
