"""The HTTP server: OpenAI and Anthropic interfaces over one engine."""
