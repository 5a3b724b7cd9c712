"""Text processing: tokenizers, chat templates, detokenization."""
