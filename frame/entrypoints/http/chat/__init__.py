"""What the chat routes of all APIs share: chat requests, tools, structured outputs, output
parsing."""
