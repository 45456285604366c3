"""The contracts every room shares: errors, tensor types, ops, the engine-file format.

Knows nothing about any model, any kernel or any executor, and imports no other room.
"""
