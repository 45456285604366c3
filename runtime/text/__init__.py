"""Tokenizer, chat template, stop strings, reasoning and tool calls."""
