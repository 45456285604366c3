"""Real clients, each in a separate environment, against the embedded model: `make clients`."""
