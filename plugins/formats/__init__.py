"""Number formats of weights and activations: pack, unpack, quantise. Knows no op."""
