"""httpx with a minute for an answer: its own five seconds are less than a busy machine may take."""

from functools import partial

import httpx

WAIT_S = 60.0
get = partial(httpx.get, timeout=WAIT_S)
post = partial(httpx.post, timeout=WAIT_S)
