"""What is decided before a graph is built: options, bucket sizes, the division of memory."""
