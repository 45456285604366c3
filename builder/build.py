"""The steps from a checkpoint to an engine folder, in order.

Knows the order of the steps and not what they do.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock

from spark_engine.builder import report
from spark_engine.builder.assemble import make_manifest, weight_specs
from spark_engine.builder.background import in_background
from spark_engine.builder.clock import StageClock
from spark_engine.builder.draft_costs import draft_costs
from spark_engine.builder.emit import (
    check_destination,
    check_space,
    locked,
    seal,
    staging,
    weights_in_work,
)
from spark_engine.builder.executors.backend import Backend
from spark_engine.builder.fingerprint import fingerprint
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.graph_checks import Subject, verify
from spark_engine.builder.graph.lower import (
    check_mlps,
    facts_of,
    lower,
    rounding_notes,
    scale_notes,
)
from spark_engine.builder.graph.packing import pack
from spark_engine.builder.graph.rewrite import RewriteContext, Rewritten, rewrite
from spark_engine.builder.graph.tower import refusal, tower_note
from spark_engine.builder.plan.options import (
    BACKENDS,
    CAPABILITIES,
    CPU,
    RTX,
    TARGETS,
    BuildPlan,
    Options,
    gpu_of,
    resolve,
)
from spark_engine.builder.record_process import recorded
from spark_engine.builder.report import BuildReport
from spark_engine.builder.rules import rules_for
from spark_engine.builder.text_files import TEXT_FILES, text_bytes, text_notes
from spark_engine.device.host_memory import available_memory
from spark_engine.device.shared_memory import HostBudget, host_budget
from spark_engine.engine_file import TOKENIZER, encode_engine, open_folder
from spark_engine.errors import CheckpointError, EngineError, OptionError
from spark_engine.hints import cuda_missing, driver_present, extra
from spark_engine.manifest import Bucket, Fingerprint, Manifest, weights_name
from spark_engine.models.drafter import with_drafter
from spark_engine.models.open_model import open_model, with_ranks
from spark_engine.models.weights.draft_weights import head_fault, with_draft_dtype
from spark_engine.models.weights.recipes import Recipe
from spark_engine.models.weights.shards import TILE, of_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.registry import REGISTRY
from spark_engine.progress import Advance, ignore
from spark_engine.tensors import Array
from spark_engine.vision import VISION
from spark_engine.weights_file import WeightLayout, fill_weights, plan_weights

CUBINS = ".cubins"  # next to the engine folders: compiled kernels by content
WORKERS = 16  # threads that make weights; numpy lets them run side by side
Progress = Callable[[str], None]
BUCKET_FILE = 1 << 20  # bytes of a `.engine` file, about
SHOWN_S = 0.1  # seconds between two looks at the progress of the weights


def build(
    checkpoint: Path,
    destination: Path,
    options: Options,
    progress: Progress,
    advance: Advance = ignore,
    record: bool | None = False,
) -> BuildReport:
    """Builds the engine folder `destination` unless it is up to date.

    `progress` receives the name of each stage, `advance` its progress. With `record` the engine is
    run once, if this machine can run it; None: only a CPU engine, and only its smallest buckets.
    `destination` is unchanged until all files are on disk. Raises CheckpointError or OptionError
    before anything is written; GraphError for a bug in the builder.
    """
    clock = StageClock(progress, advance)
    gpu_of(options)  # refuses names before anything is read
    check_destination(destination)
    clock.start("open", str(checkpoint))
    requested, options = options.target, with_target(options)
    model, plan = planned(checkpoint, options)
    found = (*no_gpu_note(requested, options.target), *model.notes, *text_notes(checkpoint))
    for note in found:
        progress(f"warning: {note}")
    with locked(destination):
        clock.start("hash", "the checkpoint")
        print_ = fingerprint(checkpoint, options, advance)
        old = unchanged(destination, plan.target, print_)
        if old is not None:
            return BuildReport(old, False, clock.seconds(), clock.peak_rss())
        backend = backend_of(plan, destination.parent / CUBINS)
        clock.start("lower", "the network to a graph for each family")
        graphs = {
            family: lower(model, plan, family)
            for family in plan.buckets.families(plan.limits.drafts)
        }
        borrowed = scale_notes(model, graphs.values())
        clock.start("verify", "the lowered graphs")
        verify_all(graphs, plan, "lowered")
        clock.start("rewrite", "the graphs by the rules")
        rewritten = {family: rewrite_graph(model, plan, g) for family, g in graphs.items()}
        clock.start("verify", "the rewritten graphs")
        verify_all(graphs, plan, "rewritten" if plan.fuse else "lowered")
        if backend.kernels:
            clock.start("pack", "the weights for the kernels")
            pack_all(graphs)
            clock.start("verify", "the packed graphs")
            verify_all(graphs, plan, "packed")
        layout = plan_weights(weight_specs([*graphs.values()]))
        small = BUCKET_FILE * len(plan.buckets)
        check_space(destination, plan.ranks * layout.total + text_bytes(checkpoint) + small)
        record_notes: tuple[str, ...] = ()
        with staging(destination) as folder:
            memory = host_budget(available_memory())  # a forked process may not ask the driver
            write = partial(emit_weights, model, graphs, layout, folder, plan.ranks, memory)
            backend.weights = folder / weights_name(0, plan.ranks)
            emitted = partial(emit_buckets, graphs, plan, layout, folder, backend, clock)
            with in_background(write, clock, backend.kernels and not memory.shared) as written:
                if backend.kernels:
                    choose_kernels(backend, [*graphs.values()], plan.target, clock, progress)
                    buckets = emitted()
                clock.start("write", f"{report.size(plan.ranks * layout.total)} of weights")
                written()
            buckets = buckets if backend.kernels else emitted()
            copy_tokenizer(checkpoint, folder / TOKENIZER)
            clock.start("seal", "the folder by its hashes")
            manifest = make_manifest(
                destination.name, model, plan, graphs, rewritten, buckets, layout, print_,
                backend.executor, backend.tactics,
            )  # fmt: skip
            manifest = seal(folder, manifest)
            if record is not False:
                clock.start("record", "the build record")
                manifest, record_notes = recorded(folder, manifest, least=record is None)
    notes = (*found, *plan.notes, *borrowed, *rounding_notes(graphs.values()), *backend.notes)
    specs = [entry.spec for entry in layout.entries.values()]
    notes += (*draft_costs(manifest, specs), *tower_note(manifest, specs), *record_notes)
    seconds = clock.seconds()
    return BuildReport(manifest, True, seconds, clock.peak_rss(), notes, clock.peak_anonymous)


def choose_kernels(
    backend: Backend,
    graphs: Sequence[FamilyGraph],
    target: str,
    clock: StageClock,
    progress: Progress,
) -> None:
    """Chooses tactics and compiles their kernels."""
    clock.start("choose", "tactics" + " by their times" * backend.timed)
    backend.choose(graphs, progress)
    clock.start("compile", f"the chosen kernels for {target}")
    backend.compile(clock.advance)


def planned(checkpoint: Path, options: Options) -> tuple[Model, BuildPlan]:
    """The model and its plan; without a draft head that is damaged and not asked for, and without a
    vision tower that the target does not run."""
    opened = open_model(checkpoint, options.rope_scaling)
    model = with_ranks(opened, options.tp, TILE if options.gpu else 1, options.across_hosts)
    if options.drafter is not None:
        try:
            model = with_drafter(model, Path(options.drafter))
        except CheckpointError as error:
            raise CheckpointError(f"--drafter {options.drafter}: {error}") from error
    plan = resolve(options, facts_of(model))
    block, unsure, head_lost = model.drafter is not None, options.drafts is None, ""
    if plan.draft and block and (fault := head_fault(model, block=True)):
        raise CheckpointError(f"--drafter {options.drafter}: {fault}")
    if plan.draft and model.has_head and (unsure or block) and (head_lost := head_fault(model)):
        model = replace(model, draft_note=head_lost)
        plan = resolve(options, facts_of(model))
    why = model.vision_note if options.vision and model.ignored.get(VISION) else ""
    if plan.vision and plan.gpu and (why := refusal(model, plan)):
        plan = resolve(replace(options, vision=False, max_image_pixels=None), facts_of(model))
    check_mlps(model, plan)
    notes = [f"built without images: {why}"] if why else []
    notes += [f"{head_lost}: the drafter alone drafts"] if block and head_lost else []
    model = with_draft_dtype(model, plan.draft.dtype) if plan.draft else model
    return model, replace(plan, notes=(*plan.notes, *notes))


def unchanged(destination: Path, target: str, print_: Fingerprint) -> Manifest | None:
    """The manifest of the intact engine in `destination` if its fingerprint is this one, else
    None."""
    try:
        old = open_folder(destination, target)
    except EngineError:
        return None
    return old.manifest if old.manifest.fingerprint == print_ else None


def rewrite_graph(model: Model, plan: BuildPlan, graph: FamilyGraph) -> Rewritten:
    """Applies the rules to one family's graph in place; applies none without `fuse`."""
    assert model.checkpoint is not None
    context = RewriteContext(graph.graph, graph.weights, model.checkpoint, REGISTRY)
    return rewrite(context, rules_for(plan.gpu) if plan.fuse else ())


def pack_all(graphs: Mapping[str, FamilyGraph]) -> None:
    for graph in graphs.values():
        pack(graph, REGISTRY)


def verify_all(graphs: Mapping[str, FamilyGraph], plan: BuildPlan, stage: str) -> None:
    """Raises GraphError for a graph that is illegal at this stage."""
    for graph in graphs.values():
        verify(Subject.of(graph, plan.limits, REGISTRY), stage)


def with_target(options: Options) -> Options:
    """The options with target and card decided: this machine's GPU, or else the CPU.

    Raises OptionError for a GPU target without the compiler's packages.
    """
    gpu = gpu_of(options)
    if gpu is None and options.target != "auto":
        return options
    try:
        import spark_engine.builder.native.nvrtc  # noqa: F401 - only checks that it is installed
        from spark_engine.device.gpu import present
    except ImportError as error:
        if gpu is None:
            return replace(options, target=CPU)
        raise OptionError(
            f"--target {gpu.name} needs NVIDIA's compiler ({error}): {extra('cuda')}"
        ) from error
    gpu = gpu_of(options, present())
    if gpu is None:
        return replace(options, target=CPU)
    return replace(options, target=gpu.name, card=gpu.card.name, gpu=gpu)


def runs_here(target: str) -> bool:
    if target == CPU:
        return True
    try:
        from spark_engine.device.gpu import architecture, capability
    except ImportError:  # without the extra `cuda`
        return False
    found = capability()
    of_rtx = found is not None and "SM{}{}".format(*found) in CAPABILITIES
    return of_rtx if target == RTX else target == architecture()


def no_gpu_note(requested: str, target: str) -> tuple[str, ...]:
    """A note if `auto` became the CPU although the machine has NVIDIA's driver."""
    if requested != "auto" or target != CPU or not driver_present():
        return ()
    if cuda_missing():
        why = f"a GPU is here, but the extra `cuda` is missing or incomplete ({extra('cuda')})"
    else:
        why = "this machine's GPU cannot be used or its architecture is unknown"
    return (f"{why}: building for the CPU; --target names another",)


def backend_of(plan: BuildPlan, cubins: Path) -> Backend:
    """The target's backend. Imported here, so that only builds that need ONNX or the compiler load
    them. Raises OptionError for options that the backend does not support."""
    module = import_module(f"spark_engine.builder.{BACKENDS[TARGETS[plan.target]]}")
    made: Backend = module.BACKEND(plan, REGISTRY, cubins)
    return made


def emit_buckets(
    graphs: Mapping[str, FamilyGraph],
    plan: BuildPlan,
    layout: WeightLayout,
    folder: Path,
    backend: Backend,
    clock: StageClock,
) -> list[Bucket]:
    clock.start("emit", "the buckets")
    buckets: list[Bucket] = []
    chosen = backend.sizes
    sizes = {f: chosen[f] if f in chosen else plan.buckets.of(f) for f in graphs}
    wanted = [(graph, size) for family, graph in graphs.items() for size in sizes[family]]
    for graph, size in wanted:
        clock.advance(len(buckets), len(wanted))
        made = backend.emit(graph, size, layout.entries)
        (folder / size.file).write_bytes(encode_engine(made.header, made.payload))
        cost = round(made.seconds * 1e6, 2)
        buckets.append(
            Bucket(size.family, size.rows, size.tile, size.file, **made.memory, cost_us=cost)
        )
    return buckets


def emit_weights(
    model: Model,
    graphs: Mapping[str, FamilyGraph],
    layout: WeightLayout,
    folder: Path,
    ranks: int,
    memory: HostBudget,
    clock: StageClock,
) -> None:
    """Evaluates the recipes of all ranks and writes one file of weights per rank, all with one
    layout. Several recipes run at once, within the free host memory. Raises CapacityError if the
    largest tensor does not fit."""
    in_work = weights_in_work(layout, memory)
    weights = {name: w for graph in graphs.values() for name, w in graph.weights.items()}
    assert model.checkpoint is not None
    reader, lock, done, shown = model.checkpoint, Lock(), 0, 0.0
    left = ranks * len(layout.entries)

    def make(recipes: Mapping[str, Recipe], name: str) -> Array:
        nonlocal done, shown, left
        value = recipes[name].evaluate(reader)
        with lock:
            done, left = done + value.nbytes, left - 1
            if not left or time.monotonic() > shown + SHOWN_S:  # other threads wait for it
                shown = time.monotonic()
                clock.look()
                clock.advance(done, ranks * layout.total)
        return value

    for rank in range(ranks):
        mine = {name: of_rank(weight.recipe, rank) for name, weight in weights.items()}
        path = folder / weights_name(rank, ranks)
        workers = min(os.cpu_count() or 1, WORKERS)
        fill_weights(path, layout, partial(make, mine), workers, in_work)


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copies the tokenizer's files unchanged; an engine without them takes token ids only."""
    found = [checkpoint / name for name in TEXT_FILES if (checkpoint / name).is_file()]
    if found:
        folder.mkdir()
    for path in found:
        shutil.copyfile(path, folder / path.name)
