"""The plugin system (hookspecs, registry, loader) and the small plugin families, one plugin a
file."""
