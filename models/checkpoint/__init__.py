"""Which tensors a checkpoint holds, under which names, in which form; and its files."""
