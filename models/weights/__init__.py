"""From stored tensors to the operands of ops: lazy recipes."""
