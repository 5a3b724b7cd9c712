"""Configuration: what a user may set, and how it is resolved for a machine, a checkpoint and the
installed plugins."""
