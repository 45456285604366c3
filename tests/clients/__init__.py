"""Real clients, each in an environment of its own, against the embedded model: `make clients`."""
