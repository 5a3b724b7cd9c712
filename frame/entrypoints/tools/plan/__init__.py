"""Plans a deployment from a configuration and a checkpoint's `config.json`, without its devices."""
