"""Which sizes of the kernels are tactics, by architecture, and the times that were recorded."""
