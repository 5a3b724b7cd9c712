"""The package frame-quantize: `frame quantize`. Imports nothing."""
