"""The blocks that model families share: their tensors, and the nodes that they write."""
