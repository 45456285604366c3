"""Architectures and cards: the table, and a card that is not in it."""

from spark_engine.kernel import CARDS, GB10, H200, KNOWN, TARGETS, target_of

GIB = 1 << 30


def test_a_target_is_an_architecture_and_a_card() -> None:
    h100 = CARDS["h100"]
    assert h100.architecture is H200.architecture and h100.name == "sm_90a"
    assert (h100.sms, h100.card.memory) == (132, 79 * GIB) and h100.bandwidth < H200.bandwidth
    assert GB10.shared_bytes == 99 * 1024 and GB10.fp4_mma and not GB10.wgmma
    assert len(CARDS) == len(KNOWN), "a card has one name"
    assert TARGETS["sm_90a"] is H200 and TARGETS["sm_121a"] is GB10
    of = {(t.name, t.architecture) for t in KNOWN}
    assert {name for name, _ in of} == set(TARGETS) and len(of) == len(TARGETS)


def test_a_card_of_the_table_is_known_by_its_name_and_size() -> None:
    assert target_of((9, 0), "NVIDIA H100 80GB HBM3", 132, 80 * GIB) is CARDS["h100"]
    assert target_of((9, 0), "NVIDIA H200 NVL", 132, 140 * GIB) is H200
    assert target_of((8, 0), "NVIDIA A100", 108, 80 * GIB) is None


def test_a_strange_card_is_as_the_driver_says() -> None:
    """Its multiprocessors and memory are its own, the rest is the nearest card's."""
    slice_ = target_of((9, 0), "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 39 * GIB)
    assert slice_ is not None and slice_.architecture is H200.architecture
    assert slice_.card.name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 60 SMs, 39 GiB"
    assert (slice_.sms, slice_.card.memory) == (60, 39 * GIB)
    assert slice_.bandwidth == CARDS["h100"].bandwidth, "its memory is nearer"
    pcie = target_of((9, 0), "NVIDIA H100 PCIe", 114, 80 * GIB)
    assert pcie is not None and pcie.sms == 114, "fewer than the table's"
    less = target_of((9, 0), "NVIDIA H100 64GB", 132, 64 * GIB)
    assert less is not None and less.card.memory == 64 * GIB, "not the table's"
