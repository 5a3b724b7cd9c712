"""HTTP extensions: the in-tree APIs, and what runs those of third parties."""
