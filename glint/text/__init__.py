"""Text in and out: tokenizer, incremental detokenising, stop strings and chat prompts."""
