"""From blocks of tensors to nodes: what the families share of the network."""
