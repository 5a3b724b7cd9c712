"""OpenAI's Realtime API: conversations in text and transcriptions over WebSocket."""
