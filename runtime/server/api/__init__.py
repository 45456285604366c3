"""The APIs that are served, a file each: their bodies, and the JSON of their answers."""
