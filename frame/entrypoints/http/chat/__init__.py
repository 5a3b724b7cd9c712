"""What all chat dialects share: from a request's fields to a prompt, and from text to parts of an answer."""
