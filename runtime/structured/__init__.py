"""Answers of a form that the request asks for: from schemas, regexes and tools to token masks."""
