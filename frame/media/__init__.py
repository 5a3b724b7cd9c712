"""Media of requests beside the core: feature files, cache keys, rows on the device, the encoder."""
