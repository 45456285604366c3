"""What is decided before a graph is built: options, sizes, how memory is shared out."""
