"""What a network is: configuration, tensor names, quantisation per tensor, the graph."""
