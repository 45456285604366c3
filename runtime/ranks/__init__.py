"""The ranks of one engine: processes that run the same step, each over its own shard of the
weights.
"""
