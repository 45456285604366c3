"""Names by which a server is called (`--allowed-hosts`, requests), and whether others reach it.

Imports no HTTP library.
"""

import re
import socket
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

from spark_engine.errors import OptionError

ALL = "*"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?"
_ALLOWED = re.compile(rf"(\*\.)?{NAME}")


def allowed_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """The names of `--allowed-hosts`, also several separated by commas. Raises OptionError."""
    names = [name.strip() for one in given for name in one.split(",")]
    for name in names:
        if name != ALL and not _ALLOWED.fullmatch(name) and address(name) is None:
            raise OptionError(
                f"--allowed-hosts has {name!r}: give a name without scheme and port, like "
                "spark.example or *.example; or *, for all"
            )
    return tuple(name.lower().rstrip(".") for name in names)


def address(name: str) -> str | None:
    """An IP address in its usual form; None for a name, and for other spellings of an address,
    which browsers do not send."""
    try:
        return str(ip_address(name.partition("%")[0]))
    except ValueError:
        return None


def is_loopback(listener: socket.socket) -> bool:
    """True if only this machine reaches the listener."""
    found = ip_address(listener.getsockname()[0].partition("%")[0])
    inner = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (inner or found).is_loopback
