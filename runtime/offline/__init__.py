"""Answers without HTTP: the Python API (`llm.py`) and batches of files (`batch.py`)."""
