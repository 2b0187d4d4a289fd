"""The HTTP server: the OpenAI, Anthropic and glint APIs over one engine."""
