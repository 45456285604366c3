"""The request bodies of each API, and the JSON that answers share. Imports no service."""
