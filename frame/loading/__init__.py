"""Loading: builds a model and loads its weights."""
