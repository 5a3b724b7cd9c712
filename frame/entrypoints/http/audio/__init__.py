"""The audio routes of the OpenAI API."""
