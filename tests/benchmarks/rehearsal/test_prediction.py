"""The prediction from parts: what nodes move, the laws of kernels, and what is held to them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import weightless_plan
from benchmarks.byte_floors import Floor, Work
from benchmarks.node_work import Amounts, amounts
from benchmarks.rehearsal.gb10 import calibration, predict
from benchmarks.rehearsal.gb10 import tables as predicted_tables
from benchmarks.rehearsal.gb10.calibration import Laws, Measured
from benchmarks.rehearsal.gb10.card_model import (
    GB10,
    LAUNCH,
    Counted,
    Law,
    Machine,
    Point,
    fitted,
    h200,
    times_of,
)
from benchmarks.steps import launch_times
from benchmarks.time_images import products, with_tower
from benchmarks.weightless_plan import Bucket, Node, label_of, plan_of
from spark_engine.builder.native.program import decide
from spark_engine.builder.native.tactics import Work as NodeWork
from spark_engine.errors import OptionError
from spark_engine.models.open_model import open_model
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType, TensorSpec
from tests.repository import ROOT

TINY = ROOT / "models" / "tiny" / "checkpoint"
SMALL = {"max_seqs": 32, "max_context": 256, "kv_tokens": 8192}
CARD = Machine("card", 10, 1e9, 1e12, 1 << 20, rates={"bf16": 1e15})


def spec(dtype: str, *dims: int) -> TensorSpec:
    return TensorSpec("x", DType(dtype), dims)


def small_plan(target: str, **given: Any) -> calibration.Plan:
    sizes = {"decode": (1, 32), "prefill": (64,), "verify": None, "drafts": 0, **SMALL}
    return plan_of(TINY, weightless_plan.options(target, **sizes | given), 100)


def test_towers_take_their_products_at_a_librarys_rate_at_least(tmp_path: Path) -> None:
    rows = list(predict.images("0.8b:bf16", Laws(CARD, {})))
    tower = open_model(with_tower("0.8b:bf16", tmp_path)).config.vision
    assert tower is not None and [row["rows"] for row in rows] == [2040, 1024, 256]
    for row in rows:
        least = products(row["rows"], tower) / GB10.rates["bf16"] * 1e3
        assert 0.99 * least < row["floor_ms"] < row["ms"] < row["apart_ms"]
        assert row["floor_ms"] < 1.3 * least + 4, "weights of 0.9 GB, and rows of the bucket alone"
        assert row["prefill_ms"] > row["prefill_floor_ms"] > 0
    shown = predicted_tables.images(rows).splitlines()
    assert len(shown) == 5 and shown[2].startswith("| 8,160 |") and "vision_attention" in shown[2]


class TestAmounts:
    def test_a_product_reads_its_weights_once_and_pads_its_tokens(self) -> None:
        ins = (spec("f8e4m3", 1, 64), spec("f8e4m3", 32, 64), spec("f32"), spec("f32", 32))
        outs, op = (spec("bf16", 1, 32),), REGISTRY["fp8_linear"]
        work = NodeWork("fp8_linear", op, {"dtype": "bf16"}, ins, outs, frozenset({1, 2, 3}))
        found = amounts(work)
        assert (found.cold, found.warm) == (32 * 64 + 4 + 4 * 32, (64.0, 64.0))
        assert (found.ops, found.kind) == (2 * 8 * 32 * 64, "e4m3")

    def test_of_two_codes_a_byte_both_are_multiplied(self) -> None:
        """The second operand is a scale of the activations, not the weight."""
        x, w = (
            (spec("u8", 9, 64), spec("f8e4m3", 9, 8)),
            (spec("u8", 32, 64), spec("f8e4m3", 32, 8)),
        )
        ins, op = (*x, *w, spec("f32", 32)), REGISTRY["nvfp4_linear_a4"]
        outs, cold = (spec("bf16", 9, 32),), frozenset({2, 3, 4})
        found = amounts(NodeWork(op.name, op, {"dtype": "bf16"}, ins, outs, cold))
        assert (found.ops, found.kind) == (2 * 16 * 32 * 128, "nvfp4")

    def test_a_block_reads_its_window_and_rows_of_its_books(self) -> None:
        """The context is longer than the window; the books have a row for each of 4096 ids."""
        slots, last = spec("i32", 3), spec("i32", 5)
        ins = (spec("i32", 24, 16), spec("f32", 24, 16), spec("bf16", 24, 32))
        ins += (spec("bf16", 4096, 32), spec("bf16", 4096, 32), last, spec("i32", 5, 7))
        op, outs = REGISTRY["draft_path"], (spec("i32", 5, 7),)
        work = NodeWork(op.name, op, {"tile": 8}, (*ins, slots, slots), outs, frozenset({3, 4}))
        assert amounts(work).cold == 3 * 7 * 17 * 2 * 32
        norm, pages = spec("f32", 128), spec("u8", 9, 8, 16, 128)
        ins = (spec("bf16", 24, 48 * 128), norm, norm, spec("f32", 64), spec("i32", 5))
        ins += (spec("f32", 2), pages, pages, spec("i32", 5, 8), slots, slots, slots)
        attrs = {"tile": 8, "heads": 32, "head_dim": 128, "window": 50}
        op, outs = REGISTRY["block_attention"], (spec("bf16", 24, 32 * 128),)
        found = amounts(NodeWork(op.name, op, attrs, ins, outs, frozenset({1, 2, 3, 5}), 100))
        assert found.cold == 4 * (2 * 128 + 64 + 2) + 3 * (50 + 8) * 2 * 8 * 128

    @pytest.mark.parametrize(("tokens", "hit"), [(1, 2), (2, 3)])
    def test_experts_are_read_as_tokens_hit_them(self, tokens: int, hit: int) -> None:
        """A token hits two of four experts, a second token one more; the shared one is added."""
        ins = (
            *(spec("bf16", tokens, 64), spec("i32", tokens, 3), spec("f32", tokens, 3)),
            *(spec("bf16", 5, 32, 64), spec("bf16", 5, 64, 16)),
        )
        attrs = {"format": "dense", "dtype": "bf16"}
        op, outs = REGISTRY["grouped_moe"], (spec("bf16", tokens, 64),)
        found = amounts(NodeWork("grouped_moe", op, attrs, ins, outs, frozenset({3, 4})))
        assert found.cold == pytest.approx((hit + 1) * 2 * 3 * 16 * 64)
        expected = 2 * (8 * hit + 8) * 3 * 16 * 64
        assert found.ops == expected, "each expert hit takes eight tokens' time"

    def test_a_large_activation_leaves_the_cache(self) -> None:
        found = Amounts(10.0, (40.0, 60.0))
        assert (found.dram(200), found.dram(100), found.dram(50)) == (10, 70, 110)
        assert found.moved == 110

    @pytest.mark.parametrize("rows", [1, 32])
    def test_a_plan_moves_what_the_floors_count(self, rows: int) -> None:
        """Two counts of the same bytes: of the packed graph's operands, and of the checkpoint's."""
        plan = small_plan("sm_121a")
        (page,) = {DType.U8}  # the embedded checkpoint asks for FP8 pages
        parts = dict(Floor(open_model(TINY)).parts(Work(rows, 100, 2, page.itemsize, 8)))
        del parts["sample"]  # logits, which the plan's nodes hand on warm
        moved = sum(node.amounts.cold for node in plan["decode", rows].nodes)
        assert moved == pytest.approx(sum(parts.values()), rel=0.03)

    def test_every_op_of_a_served_model_is_counted(self) -> None:
        """What is neither moved nor handed on would cost nothing but a launch."""
        plan = small_plan("sm_121a", verify=((32, 1),), drafts=1)
        for bucket in plan.values():
            for node in bucket.nodes:
                counted = node.amounts.moved > 0 or node.op in ("round_rows", "mark_tokens")
                assert counted or node.op == "shift_ids", node
                assert all(math.isfinite(n) for n in (node.amounts.cold, node.amounts.ops))


class TestLaws:
    def points(self, law: Law, machine: Machine) -> list[Point]:
        rng = np.random.default_rng(0)
        made = []
        for moved, ops in rng.uniform(1e5, 1e8, (12, 2)):
            node = Amounts(moved / 2, (moved / 2,), ops * 100)
            one = replace(machine, l2_bytes=1 << 40)
            seconds = 3 * times_of(node, 2, law, one).seconds
            made.append(Point((Counted(node, 2, 3),), seconds))
        return made

    def test_a_law_is_found_again(self) -> None:
        law, machine = Law(2e-6, 0.5, 0.01), replace(CARD, bandwidth=1e10, l2_bytes=1 << 40)
        found = fitted(self.points(law, machine), machine)
        assert found.launch == pytest.approx(law.launch, rel=0.1)
        assert (found.byte, found.op) == pytest.approx((law.byte, law.op), rel=0.05)

    def test_how_far_unpacking_and_multiplying_overlap_is_found_too(self) -> None:
        law, machine = Law(2e-6, 0.5, 0.01, 2.0), replace(CARD, l2_bytes=1 << 40)
        found = fitted(self.points(law, machine), machine)
        assert found.power == 2 and (found.byte, found.op) == pytest.approx((0.5, 0.01), rel=0.05)
        one = Law(0.0, 3.0, 4.0, 2.0).work(Amounts(1e10, ops=1e10), CARD)
        assert one == pytest.approx(5.0), "less than both in turn, more than the longer"

    def test_times_that_bytes_explain_say_nothing_of_the_multiprocessors(self) -> None:
        points = [Point((Counted(Amounts(n * 1e6), 1),), n * 1e-6 + 1e-6) for n in (1, 7, 40)]
        law = fitted(points, CARD)
        assert law.launch == pytest.approx(1e-6, rel=0.02)
        slow = replace(CARD, bandwidth=1e10)
        found = times_of(Amounts(1e6), 1, law, slow)
        assert found.seconds == pytest.approx(1e-4 + 1e-6, rel=0.01) and found.bound == "bytes"

    def test_a_single_time_is_explained_by_what_the_floor_is_of(self) -> None:
        """Its launch, its bytes and its operations would each explain it as well."""
        for given, grows in (
            (Amounts(0.0, (1e6,), 1e12), "op"),  # long products of few bytes
            (Amounts(0.0, (1e9,), 1e6), "byte"),
        ):
            law = fitted([Point((Counted(given, 1),), 5e-2)], CARD)
            assert getattr(law, grows) > 0 and law.launch <= 10e-6
            assert law.byte * law.op == 0
            twice = replace(given, warm=(2 * given.warm[0],), ops=2 * given.ops)
            assert times_of(twice, 1, law, CARD).seconds == pytest.approx(0.1, rel=0.01)

    def test_cycles_go_from_card_to_card(self) -> None:
        law, given = Law(1e-6, 2.0, 0.0), Amounts(0.0, (1e6,), 1e9, "bf16")
        few = replace(CARD, sms=5, clock=2e9, l2_bytes=1 << 40)
        assert law.work(given, CARD) == law.work(given, few) == pytest.approx(2e6 / 1e10)
        quick = times_of(given, 3, law, few)
        assert (quick.launch, quick.tensor) == pytest.approx((3e-6, 1e-6))
        assert quick.seconds == pytest.approx(3e-6 + 2e-4)
        assert quick.apart == pytest.approx(3e-6 + 2e-4 + 1e-6)

    def test_few_multiprocessors_draw_less(self) -> None:
        assert h200(132).dram_rate == 4.3e12
        assert h200(48, read=2.4e12).dram_rate == pytest.approx(2.4e12)
        assert replace(h200(48, read=2.4e12), sms=132).dram_rate == 4.3e12


def node(label: str, tactic: str = "t", count: float = 1e6, cost: float = 1e-9) -> Node:
    return Node(label, "fp8_linear", tactic, ("fp8_linear_k",), Amounts(count), cost)


def measured(bytes_: float, factor: float = 1.0, gap: float = 4e-6) -> Measured:
    """A bucket of ten nodes; alone each takes `gap` longer."""
    own = node("n", count=bytes_)
    bucket = Bucket("decode", int(bytes_ / 1e6), (own,) * 10)
    each = factor * (bytes_ / CARD.bandwidth + 2e-6)
    point = Point((Counted(own.amounts, 1, 10),), 10 * (each + gap))
    keys = calibration.keys_of(own, False)
    return Measured("m", bucket, ((keys, point),), 10 * each, 10, 10 * (each + gap))


class TestHeld:
    def test_what_a_launch_costs_by_itself_is_taken_off(self) -> None:
        found = calibration.held_to([measured(n * 1e6) for n in (1, 4, 16, 50)], CARD)
        for row in found:
            assert row["seen_error"] == pytest.approx(0, abs=0.01)
            assert row["unseen_error"] == pytest.approx(0, abs=0.03)

    def test_a_long_bucket_does_not_move_the_gap(self) -> None:
        """Its launches take 1 ms more by themselves, of a second: that is the clocks."""
        odd = replace(measured(50e6), seconds=1.0, alone=1.01)
        gap = calibration.gap_of([measured(1e6), measured(2e6), odd])
        assert gap == pytest.approx(4e-6) and calibration.gap_of([]) == 0

    def test_a_bucket_that_is_left_out_says_nothing(self) -> None:
        """Its times are twice too long: the prediction without them is not moved."""
        good = [measured(n * 1e6) for n in (1, 4, 16)]
        (*_, row) = calibration.held_to([*good, measured(50e6, factor=2.0)], CARD)
        assert row["unseen_error"] == pytest.approx(1 / 2 - 1, abs=0.01)
        assert row["seen_error"] > row["unseen_error"] + 0.1

    def test_rounds_of_as_many_rows_are_left_out_with_a_step(self) -> None:
        """They have nearly its nodes: with them it would not be unseen."""
        step, other = measured(50e6, factor=2.0), measured(4e6)
        round_ = replace(step, bucket=replace(step.bucket, family="verify_k1"))
        row = calibration.held_to([other, step, round_], CARD)[1]
        assert row["unseen_error"] == pytest.approx(1 / 2 - 1, abs=0.01)

    def test_alone_of_its_model_it_has_nothing_to_go_by(self) -> None:
        other = replace(measured(4e6), model="another")
        (first, second) = calibration.held_to([measured(1e6), other], CARD)
        assert first["unseen_ms"] is first["unseen_error"] is second["unseen_error"] is None

    def test_the_nearest_that_was_timed_counts(self) -> None:
        known = node("a")
        keys = calibration.keys_of(known, False)
        assert keys[-1] == ("decode", "part", "linear-fp8")
        found = {key: Law(float(i + 1)) for i, key in enumerate(keys)}
        laws = Laws(CARD, found)
        assert laws.of(known, False).launch == 1 and laws.exact(known, False)
        other = node("a", tactic="u")
        assert laws.of(other, False).launch == 2 and not laws.exact(other, False)
        assert laws.of(other, True) == Law(), "prefill is another kind"
        assert laws.fitted_by(known, False) == "tactic" and laws.fitted_by(other, False) == "op"
        part = replace(other, op="nvfp4_linear", symbols=("fp8_linear_k",))
        assert laws.fitted_by(part, False) == "part" and laws.fitted_by(other, True) == ""

    def test_a_kind_without_any_law_costs_its_bytes_and_what_the_builder_says(self) -> None:
        """Warm ones too: nothing tells how such a kernel reads the cache."""
        laws = Laws(h200(), {("prefill", "fp8_linear", "t"): Law(1e-6)})
        strange = replace(node("a", cost=1e-4), amounts=Amounts(1e3, (243e6,)))
        found = calibration.node_times(strange, laws, GB10, False)
        assert found.dram == pytest.approx(1e-3, rel=1e-4) and found.bound == "bytes"
        assert found.seconds == pytest.approx(1e-3 + LAUNCH, rel=1e-4)
        slow = replace(strange, cost=0.5)
        assert calibration.node_times(slow, laws, GB10, False).work == 0.5
        assert calibration.node_times(slow, laws, laws.machine, False).work == 0, "a GB10's cost"

    def test_an_untimed_tactic_that_does_other_work_counts_with_its_cost(self) -> None:
        known = ("decode", "fp8_linear", "t")
        laws = Laws(h200(), {known: Law(1e-6), known[:2]: Law(1e-6)})
        slow, timed = node("a", "u", cost=1.0), node("a", "t", cost=1.0)
        assert calibration.node_times(slow, laws, GB10, False).work == 1.0
        assert calibration.node_times(timed, laws, GB10, False).work == 0.0
        near = replace(slow, cost=calibration.node_times(timed, laws, GB10, False).seconds)
        assert calibration.node_times(near, laws, GB10, False).work == 0.0

    def test_emulated_products_are_not_carried_over(self) -> None:
        laws = Laws(h200(), {("decode", "fp8_linear", "t"): Law(1e-6, 0.0, 1.0)})
        given = replace(node("a"), amounts=Amounts(1e6, (), 1e12, "nvfp4"))
        assert calibration.node_times(given, laws, laws.machine, False).work > 1
        assert calibration.node_times(given, laws, GB10, False).work == 0
        wide = replace(given, amounts=Amounts(1e6, (), 1e12, "bf16"))
        assert calibration.node_times(wide, laws, GB10, False).work > 1


class TestRuns:
    def run(self, labels: list[str], us: float) -> dict[str, Any]:
        kinds = [[label, "fp8_linear", "timed", "k"] for label in dict.fromkeys(labels)]
        names = [kind[0] for kind in kinds]
        pairs = [[names.index(label), us] for label in labels]
        bucket = {"family": "decode", "rows": 1, "graph_ms": 0.02, "context": 9}
        known = {"sms": 48, "sm_mhz": 1755.0, "read": 2e12, "l2_bytes": 50 << 20}
        return {
            "model": "m",
            "machine": known,
            "buckets": [bucket | {"kinds": kinds, "launches": pairs}],
        }

    def test_launches_of_equal_nodes_are_one_point(self) -> None:
        plan = {("decode", 1): Bucket("decode", 1, (node("a"), node("b"), node("a"), node("c")))}
        (found,) = calibration.of_launches(self.run(["a"] * 4 + ["c"], 5.0), plan)
        assert (found.seconds, found.launches) == (pytest.approx(2e-5), 5)
        assert found.alone == pytest.approx(25e-6)
        (keys, point), _ = found.points
        assert keys[0] == ("decode", "fp8_linear", "timed"), "the tactic that was timed"
        assert {n.tactic for n in found.bucket.nodes} == {"timed", "t"}, "b as it was planned"
        assert point.nodes == (Counted(Amounts(1e6), 2, 2),) and point.seconds == pytest.approx(
            2e-5
        )

    def test_a_node_that_is_not_planned_is_named(self) -> None:
        plan = {("decode", 1): Bucket("decode", 1, (node("a"),))}
        with pytest.raises(ValueError, match="no node strange of fp8_linear"):
            calibration.of_launches(self.run(["strange"], 5.0), plan)
        assert calibration.of_launches(self.run(["strange"], 5.0), {}) == []

    def test_multiprocessors_draw_what_a_launch_was_seen_to_draw(self) -> None:
        run = self.run(["a"], 20.0)
        plan = {("decode", 1): Bucket("decode", 1, (node("a", count=60e6),))}
        machine = calibration.machine_of(run, calibration.of_launches(run, plan))
        assert machine.dram_rate == pytest.approx(60e6 / 20e-6) and machine.sms == 48
        small = {("decode", 1): Bucket("decode", 1, (node("a", count=10e6),))}
        run["buckets"][0]["launches"][0][1] = 1.0
        machine = calibration.machine_of(run, calibration.of_launches(run, small))
        assert machine.dram_rate == pytest.approx(2e12), "a small one may come out of the cache"

    def test_prefill_that_was_timed_before_a_rule_is_planned_without_it(self) -> None:
        """The kept times; nodes that the plan lacks would be refused."""
        (run,) = (r for r in predict.read(predict.LAUNCHES)["runs"] if r["model"] == "qwen36-27b")
        run["buckets"] = [b for b in run["buckets"] if b["family"] == "prefill"][:1]
        (found,) = calibration.of_launches(run, predict.plan_of_run(run))
        assert {"causal_conv", "gated_delta_chunk"} < {keys[0][1] for keys, _ in found.points}

    def test_a_payload_names_the_nodes_of_its_plan(self, tmp_path: Path) -> None:
        """Every launch of a built engine is found again in the plan that its run makes."""
        pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
        from spark_engine.builder.native.launches import launches
        from spark_engine.engine_file import open_folder
        from tests.builder.empty_cubins import built

        folder = open_folder(built(tmp_path), "sm_90a")
        run: dict[str, Any] = {"model": "tiny", "config": str(TINY), "target": "sm_90a"}
        run["engine_card"] = folder.manifest.card
        run |= {"options": launch_times.options_of(folder.manifest), "buckets": []}
        for file in folder.manifest.buckets:
            listed = launches(folder.engine(file).payload)
            kinds = [[label_of(n.node), n.op, n.tactic, n.symbol] for n in listed]
            pairs = [[i, 1.0] for i in range(len(kinds))]
            known = {"family": file.family, "rows": file.rows, "graph_ms": 1.0, "context": 100}
            run["buckets"].append(known | {"kinds": kinds, "launches": pairs})
        plan = predict.plan_of_run(run)
        found = calibration.of_launches(run, plan)
        assert len(found) == len(folder.manifest.buckets)
        for one in found:
            nodes = sum(n.launches * n.count for _, p in one.points for n in p.nodes)
            assert nodes == one.launches, "as many launches as were timed"

    def test_runs_are_kept_next_to_each_other(self, tmp_path: Path) -> None:
        when = {"commit": "c", "date": "d"}
        path, run = tmp_path / "r.json", self.run(["a"], 1.0) | when
        whole = {**run, "machine": {"sms": 132}}
        launch_times.save(path, run)
        launch_times.save(path, whole)
        more = run["buckets"][0] | {"rows": 8}
        both = [more, run["buckets"][0] | {"graph_ms": 7.0}]
        launch_times.save(path, {**run, "buckets": both, "commit": "e"})
        runs = json.loads(path.read_text())["runs"]
        assert [r["machine"]["sms"] for r in runs] == [132, 48]
        assert [(b["rows"], b["graph_ms"]) for b in runs[1]["buckets"]] == [(8, 0.02), (1, 7.0)]
        last = run | {"buckets": [more | {"graph_ms": 9.0}], "commit": "f"}
        for _ in range(2):  # a bucket that stays does so as what it is
            launch_times.save(path, last)
            kept = json.loads(path.read_text())["runs"][1]
        (old, new), commit = kept["buckets"], kept["commit"]
        assert (commit, old["commit"], old["date"]) == ("f", "e", "d") and "commit" not in new
        assert [launch_times.of_run(bucket) for bucket in kept["buckets"]] == [False, True]


class TestPredicted:
    def test_a_floor_is_of_bytes_or_of_operations(self) -> None:
        by_bytes = replace(node("a"), amounts=Amounts(243e6, (1e12,)))
        by_tensor = replace(node("b"), amounts=Amounts(1.0, (), 200e9, "bf16"))
        assert predict.floor_of(by_bytes) == pytest.approx(1e-3)
        assert predict.floor_of(by_tensor) == pytest.approx(2e-3)
        bucket = Bucket("decode", 1, (by_bytes, by_tensor, by_tensor))
        laws = Laws(h200(), {("decode", "fp8_linear", "t"): Law()})
        row = predict.predicted(bucket, laws, replace(GB10, l2_bytes=1 << 50))
        assert (row["floor_ms"], row["byte_floor_ms"]) == (5.0, 1.0)
        assert [s["node"] for s in row["slowest"]] == ["b", "a"]
        assert row["bounds_ms"] == {"bytes": 1.001, "tensor": 4.002}

    def test_kernels_without_a_time_are_named_with_their_shares(self) -> None:
        """One by its op, one by nothing at all; the one that was timed is not among them."""
        timed, other = node("a", "t", count=6e6), node("b", "u", count=3e6)
        strange = replace(node("c", "v", count=1e6), op="new_op", symbols=("new", "newer"))
        bucket = Bucket("decode", 1, (timed, other, strange))
        law = Law(1e-6)
        laws = Laws(h200(), {("decode", "fp8_linear", "t"): law, ("decode", "fp8_linear"): law})
        row = predict.predicted(bucket, laws) | {"model": "m"}
        first, last = row["untimed"]
        assert (first["op"], first["tactic"], first["fitted_by"]) == ("fp8_linear", "u", "op")
        assert (last["op"], last["tactic"], last["fitted_by"]) == ("new_op", "v", "")
        assert (last["launches_share"], last["bytes_share"]) == (0.5, 0.1)
        assert first["ms_share"] == pytest.approx(first["ms"] / row["ms"], abs=0.02)

    def test_a_node_that_no_tactic_takes_is_no_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would cost nothing at all, and no test would fail."""
        none = SimpleNamespace(tactic=None, plan=None, seconds=0.0, refused={"t": "too wide"})

        def decided(graph: Any, size: Any, chooser: Any) -> Any:
            return replace(decide(graph, size, chooser), nodes=((graph.nodes[0], none),))

        monkeypatch.setattr(weightless_plan, "decide", decided)
        with pytest.raises(OptionError, match=r"(?s)no CUDA tactic yet for .*too wide \(t\)"):
            small_plan("sm_121a")

    def test_a_block_drafter_has_its_own_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def planned(model: str, given: Any) -> calibration.Plan:
            seen.append(given)
            nodes = node("a", count=243e6), node("draft.b", count=486e6), node("dflash.fill")
            step, family = Bucket("decode", 1, nodes[:1]), f"verify_k{given.drafts}"
            return {("decode", 1): step, (family, 1): Bucket(family, 1, nodes)}

        monkeypatch.setattr(predict, "plan_of", planned)
        rows = [*predict.default_rounds("27b:nvfp4-a4", Laws(CARD, {}))]
        assert [given.drafter for given in seen] == [None, str(predict.DRAFTER[0])]
        shown = predicted_tables.default_rounds(rows).splitlines()[2:]
        timed = "1.0 | 3.0 (3.0) | 3.0"
        assert shown[0] == f"| draft head, 3 | {timed} | 2.82 | 938 | `draft.b` 2.0 (2.0) |"
        assert shown[1] == f"| DFlash2, 7 | {timed} | 4.40 | 1,463 | `draft.b` 2.0 (2.0) |"
        assert len([*predict.default_rounds("qwen36-35b-a3b", Laws(CARD, {}))]) == 1

    def test_tokens_that_a_round_brings(self) -> None:
        assert predict.kept((0.8, 0.5, 0.5), 0) == 1
        assert predict.kept((0.8, 0.5, 0.5), 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)

    def test_a_file_is_held_to_its_limit(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "f"
        with pytest.raises(SystemExit):  # no such file
            predict.main(["--held-to", str(path)])
        path.touch()
        good = [measured(n * 1e6) for n in (1, 4, 16)]
        monkeypatch.setattr(predict, "learnt", lambda path: [(CARD, good)])
        with pytest.raises(SystemExit) as ended:
            predict.main(["--held-to", str(path)])
        assert ended.value.code == 0
        odd = [replace(m, seconds=m.seconds * (1.5 if i else 1)) for i, m in enumerate(good)]
        monkeypatch.setattr(predict, "learnt", lambda path: [(CARD, odd)])
        with pytest.raises(SystemExit, match="off by more than 10%"):
            predict.main(["--held-to", str(path)])

    def test_a_rehearsal_has_the_plan_of_what_it_rehearses(self) -> None:
        there = small_plan("sm_121a")["decode", 32]
        assert small_plan("sm_90a", rehearses="sm_121a")["decode", 32] == there
        assert small_plan("sm_90a")["decode", 32] != there


def test_tables_of_predictions_by_hand(tmp_path: Path) -> None:
    part = {"node": "n", "op": "o", "tactic": "t", "ms": 2.0, "floor_ms": 1.0, "nodes": 3}
    kind = {"op": "new", "tactic": "v", "fitted_by": "", "ms": 1.0, "ms_share": 0.25}
    kind |= {"launches_share": 0.5, "bytes_share": 0.125}
    near = kind | {"op": "old", "fitted_by": "op", "ms_share": 0.3}
    known = {"model": "qwen36-27b", "state": "f32", "slowest": [part | {"bound": "issue"}]}
    step = known | {"family": "decode", "rows": 1, "ms": 80.0, "apart_ms": 100.0}
    step |= {"byte_floor_ms": 70.0, "floor_ms": 75.0}
    rows = [
        step,
        step | {"state": "bf16", "ms": 40.0, "untimed": [kind]},
        step
        | {"family": "prefill", "rows": 64, "ms": 4096.0}
        | {"untimed": [near, kind | {"ms_share": 0.2}]},
        known | {"family": "rounds", "rows": 1, "acceptance": [0.5], "k": 1, "tok_s": {"1": 31.5}},
    ]
    held = {"model": "qwen36-27b", "family": "prefill", "rows": 2, "measured_ms": 10.0}
    held |= {"seen_ms": 11.0, "seen_error": 0.1, "unseen_ms": None, "unseen_error": None}
    whole = {"machine": "H", "source": "s.json", "commit": "c", "date": "d", "held": [held]}
    (tmp_path / "p.json").write_text(json.dumps(whole | {"rows": rows}))
    text = predicted_tables.predicted({"qwen36-27b": "Q", "other": "O"}, tmp_path / "p.json")
    assert (
        "\n| 1 | 70.0 | 75.0 | 80.0 (100.0) | 12.5 (10.0) | 12.5 (floor 13.3) | 40.0, 25.0 |"
        in text
    )
    assert "\n| 1 | `n` (o, t) | 3 | 2.0 | 1.0 | issue |" in text
    assert "\n| 4,096 | 75 | 4,096 (100) | 1,000 (40,960) | `n` (o, t) 2 (1) |" in text
    assert "Kernels without a measured time, of 2 buckets:" in text
    strange = "**no measurement**: its bytes, and the builder's cost model"
    assert f"\n| new, v | {strange} | 2 | decode 1, bf16 states | 50.0% | 12.5% | 25.0% |" in text
    other = "other tactics of the op | 1 | prefill 4096, f32 states | 50.0% | 12.5% | 30.0% |"
    assert text.index(f"\n| old, v | {other}") < text.index("\n| new, v |")
    assert "\n| 1 | 31.5 (1) |" in text and "O," not in text
    assert "\n| Q, prefill | 128 | 10.00 | 11.00 (+10.0%) | – |" in text
