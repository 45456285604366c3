"""Every node of an engine alone, against the reference of its op."""
