"""The backends: an executor's build half each, and the protocol that `build.py` calls."""
