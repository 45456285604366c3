"""What kernels of several families share: PTX wrappers, number formats, epilogues."""
