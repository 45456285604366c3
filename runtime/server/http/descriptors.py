"""Descriptors of a server: their limit, and how many connections it allows."""

import os
import resource

SPARE = 16  # descriptors for files opened while serving, and for connections being accepted
MOST_DESCRIPTORS = 1 << 20  # some systems' hard limit is a thousand times this


def raise_descriptor_limit() -> int:
    """Raises the limit of descriptors of this process and its children to the most; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connection_capacity(limit: int, kinds: int = 1) -> int:
    """The connections of each of `kinds` that `limit` descriptors allow; at least one."""
    return max(1, (limit - len(os.listdir("/proc/self/fd")) - SPARE) // kinds)
