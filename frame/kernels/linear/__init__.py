"""Matrix products of token rows with dense weights."""
