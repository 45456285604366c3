"""Times tactics on this machine's GPU: the median of replayed graphs over cold weights and states.

Knows how a kernel is timed, and the contract of tactics; knows no op. A graph repeats the node's
launches, each over its own copy of the operands that are cold in an engine (weights, states);
together the copies exceed the L2 cache. Activations are not copied: they are warm, as they are
after the kernel that writes them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.cuda_sources import sources
from spark_engine.builder.native.rank_gpus import RankGpus, reach_each_other
from spark_engine.builder.native.replays import Timed, medians
from spark_engine.builder.native.tactics import Chosen, Work
from spark_engine.builder.native.timing_inputs import Filling, fillings
from spark_engine.builder.native.timings import Machine, Timings, digest_of, driver_version, key_of
from spark_engine.device.gpu import Function, Gpu, name_and_driver
from spark_engine.device.resources import DeviceResources
from spark_engine.device.shared_memory import kept_of
from spark_engine.device.startup_lock import silent, startup_lock
from spark_engine.errors import CapacityError, ExecutorError, InternalError
from spark_engine.kernel import NCCL, Launch, Plan, Pointer, Tactic, Target

Launches = list[tuple[Function, Launch]]
Queues = list[Callable[[], None]]
COLD = 2  # size of all copies, in L2 caches
MOST_COPIES, LEAST_RUNS = 32, 4
ENOUGH = 2e-4  # seconds of a run that is measured without others next to it
FAR = 2.0  # times another tactic's seconds: known after such a run
PLACE = 256  # bytes: a boundary of the driver's allocations
# Share of the free memory that one measurement may take; half of it if GPU and host share their
# memory, since the host holds the operands while they are made.
SHARE = 0.8
VERSION = Path("/proc/driver/nvidia/version")


class GpuTimer:
    """A `Timer` over the first GPU, and a context manager; the file `known` has earlier times.

    `cubins` is the folder of compiled kernels, from which `compiled` takes them unless it is given;
    `say` receives progress messages. Frees all GPU memory at the end.
    """

    def __init__(
        self,
        target: Target,
        cubins: Path,
        known: Path,
        say: Callable[[str], None] = silent,
        compiled: Callable[[nvrtc.Job], nvrtc.Cubin] | None = None,
    ) -> None:
        self._compiled = compiled or partial(nvrtc.compile, target=target, cache=cubins)
        self._timings = Timings(known, this_machine())
        self._gpu = Gpu()
        self._target, self._cubins = target, cubins
        self._ranks: RankGpus | None = None
        self._loaded: dict[tuple[nvrtc.Job, int], tuple[nvrtc.Cubin, Function]] = {}
        self._say, self._lost = say, 0

    _bench: _Bench | None = None  # of the last work: its tactics share the operands

    def __enter__(self) -> GpuTimer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._timings.save()
        self._free_bench()
        self._close_ranks()
        self._gpu.close()

    @property
    def notes(self) -> tuple[str, ...]:
        lost = (
            f"{self._lost} measurements found too little memory free, and where one did, tactics "
        )
        lost += "were chosen by prediction: stop other programs, and build again"
        return (*self._timings.notes, *([lost] if self._lost else []))

    def __call__(self, work: Work, tactic: Tactic, plan: Plan) -> float | None:
        """Seconds of one run of the plan. None if the GPU's memory does not hold it, or if it needs
        more ranks than this machine has GPUs that read each other's memory.

        Raises InternalError naming a tactic that the GPU cannot run.
        """
        if any(launch.source == NCCL for launch in plan.launches):
            return None
        key = key_of(work, tactic, plan, _texts(tactic, plan))
        if (known := self._timings.get(key)) is not None:
            return known
        try:
            measure = self._measure_ranks if plan.symmetric else self._measure
            seconds = measure(work, tactic, plan)
        except CapacityError:  # another program took the memory meanwhile
            self._lost += 1
            return None
        except ExecutorError as error:
            dims = [(str(s.dtype), s.dims) for s in work.ins]
            raise _failed(f"{work.name}/{tactic.name} over {dims}", error) from error
        if seconds is not None:
            self._timings.put(key, seconds)
        elif not plan.symmetric:  # else there are too few GPUs, and free memory does not help
            self._lost += 1
        return seconds

    def whole(self, variants: Sequence[Sequence[Chosen]]) -> list[float] | None:
        """Seconds of one run of all launches of a bucket, as one graph, for each variant: the same
        nodes, launched in other forms or orders. None if the memory does not hold them.

        Every node has separate operands and results, as when it is timed alone, so that no value
        depends on another node's; the variants' graphs are replayed in turns. Raises InternalError
        if the GPU cannot run them.
        """
        keys = [_key_of_all(variant) for variant in variants]
        known = [seconds for key in keys if (seconds := self._timings.get(key)) is not None]
        if len(known) == len(variants):
            return known
        try:
            found = self._measure_all(variants)
        except CapacityError:
            found = None
        except ExecutorError as error:
            raise _failed("a bucket's launches as one graph", error) from error
        if found is None:
            self._lost += 1
            return None
        for key, seconds in zip(keys, found, strict=True):
            self._timings.put(key, seconds)
        return found

    def _fits(self, nbytes: int) -> bool:
        """True if one measurement may take so many bytes."""
        share = SHARE / 2 if self._gpu.integrated else SHARE
        kept = kept_of(self._gpu.total_bytes) if self._gpu.integrated else 0
        return nbytes <= share * (self._gpu.free_bytes - kept)

    def _measure_all(self, variants: Sequence[Sequence[Chosen]]) -> list[float] | None:
        self._free_bench()
        nodes = {(w.key, p.scratch): (w, p) for variant in variants for w, _, p in variant}
        benches = {key: _Bench(self._gpu, work) for key, (work, _) in nodes.items()}
        plans = {id(p): (t, p) for variant in variants for _, t, p in variant}  # of the decisions
        held = DeviceResources(self._gpu)
        try:
            with startup_lock(self._gpu.integrated, self._say):
                if not self._fits(sum(b.missing(nodes[key][1]) for key, b in benches.items())):
                    return None
                functions = {key: self._functions(*plan) for key, plan in plans.items()}
                for key, bench in benches.items():
                    bench.fill(nodes[key][1])
            known: dict[tuple[int, int, int], Queues] = {}
            queues = []
            for variant in variants:
                turns, queue = Counter[int](), Queues()
                for work, _, plan in variant:
                    bench = benches[work.key, plan.scratch]
                    turn = turns[id(bench)] % bench.copies
                    turns[id(bench)] += 1
                    at = id(bench), id(plan), turn
                    if at not in known:
                        known[at] = bench.queues(functions[id(plan)], turn)
                    queue += known[at]
                queues.append(partial(_run, queue))
            return medians([Timed(held, queue) for queue in queues])
        finally:
            held.close()
            for bench in benches.values():
                bench.free()

    def _measure(self, work: Work, tactic: Tactic, plan: Plan) -> float | None:
        if self._bench and self._bench.work != work:
            self._free_bench()
        try:
            with startup_lock(self._gpu.integrated, self._say):  # while no engine starts
                bench = self._bench or _Bench(self._gpu, work)
                if not self._fits(bench.missing(plan)):
                    return None
                launches = self._functions(tactic, plan)
                self._bench = bench
                bench.fill(plan)
            return bench.seconds(launches)
        except BaseException:
            self._free_bench()
            raise

    def _free_bench(self) -> None:
        if (bench := self._bench) is not None:
            self._bench = None
            bench.free()

    def _measure_ranks(self, work: Work, tactic: Tactic, plan: Plan) -> float | None:
        """`_measure` of a plan that all ranks run at once, each on its own GPU."""
        ranks = int(work.attrs["ranks"])
        if self._target.architecture.rehearses or not reach_each_other(ranks):
            return None
        self._free_bench()
        if self._ranks is None or self._ranks.symmetric < plan.symmetric:
            self._close_ranks()
            self._ranks = RankGpus(range(ranks), self._target, self._cubins, plan.symmetric)
        found = fillings(work, np.random.default_rng(0))
        operands = [[np.resize(f.pattern, f.nbytes) for f in found]] * ranks
        outputs = [spec.nbytes for spec in work.outs]
        try:
            with self._ranks.placed(tactic, plan, operands, outputs) as (_, queues):
                return self._ranks.seconds(queues)
        finally:
            self._gpu.use()

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
            self._gpu.use()

    def _functions(self, tactic: Tactic, plan: Plan) -> Launches:
        launches = []
        for launch in plan.launches:
            source = launch.source or tactic.source
            job = nvrtc.Job(source, launch.defines, (launch.symbol,))
            key = job, launch.shared  # a function allows one size
            if key not in self._loaded:
                cubin = self._compiled(job)
                found = self._gpu.load(cubin.code, job.symbols, cubin.launched(launch).shared)
                self._gpu.load_function(found[launch.symbol])
                self._loaded[key] = cubin, found[launch.symbol]
            cubin, function = self._loaded[key]
            launches.append((function, cubin.launched(launch)))
        return launches


class _Bench:
    """A node's operands and results, with `copies` of the cold ones, and the scratch of a plan."""

    def __init__(self, gpu: Gpu, work: Work) -> None:
        self._held, self._of_plan = DeviceResources(gpu), DeviceResources(gpu)
        self._gpu, self.work, self._filled = gpu, work, False
        self._best = math.inf  # seconds of a run, of the plans so far
        self._fillings = fillings(work, np.random.default_rng(0))
        cold = sum(self._fillings[i].nbytes for i in work.cold)
        self.copies = min(MOST_COPIES, max(1, -(-COLD * gpu.l2_bytes // max(cold, 1))))
        sizes = [*(f.nbytes for f in self._fillings), *(s.nbytes for s in work.outs)]
        places = len(sizes) + self.copies * len(work.cold)
        self._own = sum(sizes) + (self.copies - 1) * cold + places * PLACE

    def missing(self, plan: Plan) -> int:
        """Bytes that `fill` allocates for this plan."""
        return (0 if self._filled else self._own) + _scratch_bytes(plan)

    def fill(self, plan: Plan) -> None:
        """Allocates and writes operands, unless an earlier plan's are there, and zeroed scratch."""
        if not self._filled:
            self._place_operands()
            self._filled = True
        self._next = self._of_plan.memory(_scratch_bytes(plan)) if plan.scratch else 0
        self._scratch = [self._placed(s.nbytes) for s in plan.scratch]
        for need, address in zip(plan.scratch, self._scratch, strict=True):
            if need.zeroed:
                self._gpu.fill(address, 0, max(need.nbytes, 1))
        self._gpu.wait()

    def _place_operands(self) -> None:
        self._next = first = self._held.memory(self._own)
        cold = {i: self._operand(self._fillings[i]) for i in sorted(self.work.cold)}
        one, done = self._next - first, 1
        while one and done < self.copies:  # all cold operands at once, by doubling
            more = min(done, self.copies - done)
            self._gpu.copy(first + done * one, first, more * one)
            done += more
        self._next = first + self.copies * one
        self._inputs = [
            [cold[i] + n * one for n in range(self.copies)] if i in cold else [self._operand(f)]
            for i, f in enumerate(self._fillings)
        ]
        aliases = self.work.op.aliases(self.work.attrs) if self.work.op else {}
        self._outputs = [
            self._inputs[aliases[i]] if i in aliases else [self._placed(spec.nbytes)]
            for i, spec in enumerate(self.work.outs)
        ]

    def seconds(self, launches: Launches) -> float:
        """The median over replays of one run, or what one replay says of a tactic that is far
        slower than another one; releases the plan's scratch and graphs."""

        def graph(runs: int) -> Timed:
            queues = [queue for turn in range(runs) for queue in self.queues(launches, turn)]
            return Timed(self._of_plan, partial(_run, queues))

        one = graph(1)
        found = one.seconds()
        if found <= max(FAR * self._best, ENOUGH):
            runs = max(self.copies, 1 if found > ENOUGH else LEAST_RUNS)
            if runs == 1:
                (found,) = medians([one], self._best, warm=1)
            else:
                found = medians([graph(runs)], self._best * runs)[0] / runs
        self._of_plan.close()
        self._best = min(found, self._best)
        return found

    def free(self) -> None:
        self._of_plan.close()
        self._held.close()

    def _operand(self, filling: Filling) -> int:
        address = self._placed(filling.nbytes)
        self._repeat(address, filling)
        return address

    def _placed(self, nbytes: int) -> int:
        """The address of the next bytes of the block, on a boundary of PLACE."""
        address, self._next = self._next, self._next + -(-nbytes // PLACE) * PLACE
        return address

    def _repeat(self, address: int, filling: Filling) -> None:
        """Writes the pattern over the whole buffer: once from the host, then doubling."""
        done = min(filling.pattern.nbytes, filling.nbytes)
        if done == 0:
            return
        self._gpu.upload(address, filling.pattern[:done])
        while done < filling.nbytes:
            more = min(done, filling.nbytes - done)
            self._gpu.copy(address + done, address, more)
            done += more

    def queues(self, launches: Launches, turn: int) -> Queues:
        """What queues the launches over the copies of this turn."""
        found = []
        for function, launch in launches:
            values = [
                self._address(a, turn) if isinstance(a, Pointer) else a.value for a in launch.args
            ]
            found.append(self._gpu.prepare(function, launch.shape, values))
        return found

    def _address(self, pointer: Pointer, turn: int) -> int:
        if pointer.kind == "scratch":
            return self._scratch[pointer.index]
        found = self._inputs if pointer.kind == "input" else self._outputs
        copies = found[pointer.index]
        return copies[turn % len(copies)]


def _scratch_bytes(plan: Plan) -> int:
    return sum(s.nbytes + PLACE for s in plan.scratch)


def _run(queues: Queues) -> None:
    for queue in queues:
        queue()


def _failed(what: str, error: ExecutorError) -> InternalError:
    return InternalError(f"timing {what}: {error}; --no-timing builds without the GPU")


def _key_of_all(nodes: Sequence[Chosen]) -> str:
    """sha256 of what a time of all nodes in this order depends on, but for the machine."""
    keys: dict[tuple[int, int], str] = {}
    digest = hashlib.sha256()
    for work, tactic, plan in nodes:
        node = id(work), id(plan)  # nodes of one decision share them
        if node not in keys:
            keys[node] = key_of(work, tactic, plan, _texts(tactic, plan))
        digest.update(keys[node].encode())
    return digest.hexdigest()


def _texts(tactic: Tactic, plan: Plan) -> str:
    return _digest(frozenset(launch.source or tactic.source for launch in plan.launches))


@cache  # read once: what is timed is what was there first
def _digest(names: frozenset[str]) -> str:
    texts = {header: text for name in names for header, text in sources(name).items()}
    return digest_of(texts)


def this_machine() -> Machine:
    """The machine on which times depend, with its first GPU. Raises ExecutorError without a GPU."""
    name, version = name_and_driver()
    try:
        found = driver_version(VERSION.read_text())
    except OSError:
        found = None
    return Machine(name, found or version, nvrtc.compiler_version())
