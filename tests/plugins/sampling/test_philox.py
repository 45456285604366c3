"""Random bits are those of the published generator, in numpy and in nodes."""

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.ops.sampling import philox
from tests.plugins.run_op import run_nodes

VECTORS = (  # the known answers published with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_philox_gives_the_published_words() -> None:
    for counter, key, words in VECTORS:
        assert philox.words(counter, key) == words


def test_philox_nodes_equal_the_published_words_and_the_reference() -> None:
    rng = np.random.default_rng(0)
    counters = np.concatenate([[v[0] for v in VECTORS], rng.integers(0, 1 << 32, (200, 4))])
    keys = np.concatenate([[v[1] for v in VECTORS], rng.integers(0, 1 << 32, (200, 2))])
    inputs = {"even": counters[:, ::2], "odd": counters[:, 1::2], "key": keys}

    def build(f: Text) -> None:
        for name, value in zip(("a", "b"), philox.words_text(f, *inputs), strict=True):
            f("Identity", value, out=name)

    even, odd = run_nodes(build, inputs, {"a": keys, "b": keys})
    got = np.stack([even[:, 0], odd[:, 0], even[:, 1], odd[:, 1]], axis=1).tolist()
    pairs = zip(counters.tolist(), keys.tolist(), strict=True)
    assert got[:3] == [list(v[2]) for v in VECTORS]
    assert got == [list(philox.words(c, k)) for c, k in pairs]
