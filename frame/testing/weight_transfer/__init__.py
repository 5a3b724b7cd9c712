"""The conformance suite of weight transfers."""
