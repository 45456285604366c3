"""The names of nodes in a folder: digests of the engine, the salt and all tokens of a path."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from spark_engine.runtime.engine.disk.cache_folder import NODE, page_file, state_file
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode

TAG = 4  # bytes of a node's digest that are the engine's


class NodeNames:
    """`seed`: 32 bytes, what the content of states depends on besides salts and tokens."""

    def __init__(self, seed: bytes) -> None:
        self._seed, self.tag = seed, seed[:TAG]

    def root(self, salt: bytes) -> bytes:
        return self.tag + blake2b(salt, digest_size=NODE - TAG, key=self._seed).digest()

    def child(self, parent: bytes, name: bytes) -> bytes:
        """The digest of a node from its parent's and its name."""
        return self.tag + blake2b(parent + name, digest_size=NODE - TAG).digest()

    def digest(self, node: PageNode) -> bytes:
        new = []
        for one in node.path():
            if one.digest:
                break
            new.append(one)
        for one in reversed(new):
            up = one.parent
            one.digest = self.root(one.name) if up is None else self.child(up.digest, one.name)
        return node.digest

    def page(self, node: PageNode) -> str:
        return page_file(self.digest(node))

    def state(self, state: CachedState) -> str:
        return state_name(self.digest(state.node), array("i", state.suffix_tokens))


def state_name(node: bytes, suffix: array[int]) -> str:
    """The file of the state that is `suffix` after a node."""
    return state_file(node, len(suffix), blake2b(suffix.tobytes(), digest_size=16).digest())
