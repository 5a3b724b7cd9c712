"""Publication of what a prefix cache holds, for routers and other subscribers."""
