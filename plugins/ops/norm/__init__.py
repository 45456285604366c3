"""RMSNorm over whole rows, alone and with what it is fused with."""
