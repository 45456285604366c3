"""How exporters name modules in a quantisation config: matchers of names, and their bounds.

A matcher takes the spellings of one module's name. Knows names, and no format.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterable

from spark_engine.errors import CheckpointError

Match = Callable[[tuple[str, ...]], bool]
MOST_PATTERNS, MOST_EXACT = 256, 4096  # those that repeat something, and all


def check_patterns(entries: Collection[str], where: str) -> None:
    """Raises CheckpointError for patterns that might take for ever, which no exporter writes."""
    repeating = [e for e in entries if re.search(r"[*+{]", e)]
    slow = (e for e in repeating if re.search(r"\)[*+{]", e) or len(re.findall(r"[*+}]", e)) > 8)
    what = repr(found)[:80] if (found := next(slow, None)) else ""
    if len(entries) > MOST_EXACT or len(repeating) > MOST_PATTERNS:
        what = f"{len(entries)} patterns"
    if what:
        raise CheckpointError(f"{where}: {what} would take too long; name the modules instead")


def parents(name: str) -> Iterable[str]:
    """The name, then each module that holds it, the nearest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def wildcards(patterns: Iterable[str]) -> Match:
    """fnmatch patterns (modelopt) against a name or any of its parents."""
    exact = {p for p in patterns if not any(c in p for c in "*?[")}
    others = "|".join(fnmatch.translate(p) for p in patterns if p not in exact)
    pattern = re.compile(others or "(?!)")

    @functools.cache  # experts by the thousand have the same parents
    def matched(name: str) -> bool:
        if name in exact or pattern.match(name):
            return True
        return "." in name and matched(name.rpartition(".")[0])

    return lambda names: any(map(matched, names))


def by_expert(entries: Iterable[str]) -> bool:
    """True if names or fnmatch patterns may tell the experts of a group apart: not by a beginning
    that ends before their numbers, nor by pieces without a digit."""

    def same_for_all(entry: str) -> bool:
        if entry.startswith("re:") or "?" in entry or "[" in entry:
            return False
        begins = "*" not in entry.rstrip("*") and ".experts." not in entry
        return begins or not any(c.isdigit() for c in entry)

    return not all(map(same_for_all, entries))


def own_names(entries: Iterable[str]) -> Match:
    """Names, and `re:` patterns matched from a name's start (compressed-tensors): an entry
    does not apply to the modules inside the one that it names."""
    exact = {e for e in entries if not e.startswith("re:")}
    patterns = [re.compile(e.removeprefix("re:")) for e in entries if e.startswith("re:")]
    return lambda names: any(
        name in exact or any(p.match(name) for p in patterns) for name in names
    )


def beginnings_or_ends(entries: Iterable[str]) -> Match:
    """Names with all that they hold, and last words of names (transformers)."""
    exact = frozenset(entries)

    def match(names: tuple[str, ...]) -> bool:
        if any(parent in exact for name in names for parent in parents(name)):
            return True
        words = names[0].split(".")
        return any(".".join(words[i:]) in exact for i in range(len(words)))

    return match
