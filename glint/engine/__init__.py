"""The engine: it takes requests, plans steps, runs them natively and turns tokens into text."""
