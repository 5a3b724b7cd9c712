"""Text: tokenizing, detokenizing and chat templates."""
