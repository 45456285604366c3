"""Structured outputs: from schemas, regexes, grammars and tools to token masks."""
