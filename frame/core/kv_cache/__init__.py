"""The KV cache: the page pool, its allocator, the prefix caches, and how much memory they get."""
