"""Tools that look at a running model: recordings of the profiler, and the search for values that
are not finite."""
