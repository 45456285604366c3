"""`spark-build`: reads options, prints a report; an error is one line.

Knows the command line; the work is `build.build`, and `command` says how it ends.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spark_engine.builder import checkpoint_list
from spark_engine.builder.build import build, runs_here
from spark_engine.builder.emit import check_destination
from spark_engine.builder.fetch import fetch, name_of
from spark_engine.builder.graph.lower import MLP_ACTIVATIONS
from spark_engine.builder.plan import budget, images
from spark_engine.builder.plan.buckets import DEFAULT_PREFILL, listed, parse_rounds, parse_sizes
from spark_engine.builder.plan.drafts import DTYPES, parse_drafts, parse_vocab
from spark_engine.builder.plan.options import (
    CPU_MAX_CONTEXT,
    CPU_MAX_SEQS,
    KV_BUDGET,
    KV_DTYPES,
    STATE_DTYPES,
    TARGETS,
    Options,
    gpu_of,
    target_for,
)
from spark_engine.builder.plan.ring import GDN_RING
from spark_engine.builder.plan.rope_scaling import parse_rope_scaling
from spark_engine.builder.report import report_json, show_report
from spark_engine.command import command
from spark_engine.device.choice import HELP, choose
from spark_engine.engine_file import has_text
from spark_engine.hints import explain
from spark_engine.kernel import CARDS
from spark_engine.models.open_model import read_description
from spark_engine.progress import Progress

COLLECTIONS = 100_000, 20, 20  # rare: nearly all of what a build makes lives until its end
PARSERS: dict[str, Callable[[str], object]] = {  # of options that are more than a number or a name
    "decode": partial(parse_sizes, "--decode"),
    "prefill": partial(parse_sizes, "--prefill"),
    "verify": partial(parse_rounds, "--verify"),
    "rope_scaling": parse_rope_scaling,
    "drafts": parse_drafts,
    "draft_vocab": parse_vocab,
}
Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _one_of(*words: str) -> Complete:
    """Completes `auto` and these."""
    return lambda context, parameter, start: [w for w in ("auto", *words) if w.startswith(start)]


class _Build(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does; NoSuchOption for another server's option names ours."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            words = error.message + explain(error.option_name)
            raise click.NoSuchOption(error.option_name, words, error.possibilities, ctx) from None


@click.command(cls=_Build)
@click.argument("checkpoint", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine folder to write.")
@click.option(
    "--target",
    default="auto",
    shell_complete=_one_of(*TARGETS),
    help=f"What to build for: auto (this machine's GPU, else cpu), {', '.join(TARGETS)}.",
)
@click.option("--executor", default="auto", help="What runs the engine: auto, ort, native, trt.")
@click.option(
    "--card",
    default="auto",
    shell_complete=_one_of(*CARDS),
    help=f"The GPU to fit: auto (the one here, else the target's first), {', '.join(CARDS)}.",
)
@click.option(
    "--as",
    "rehearses",
    default="",
    metavar="TARGET",
    help="Rehearse another GPU on this one: choose kernels and grids for TARGET, and compile "
    "them for --target. SPARK_REHEARSE=TARGET runs the engine on as many multiprocessors.",
)
@click.option("--device", type=click.IntRange(0), metavar="N", help=HELP)
@click.option(
    "--decode",
    help="Rows of the decode buckets, e.g. 1,2,4; by default 1, 2, 4, … to --max-seqs, and "
    "sizes between them on a GPU.",
)
@click.option(
    "--prefill",
    help=f"Tokens of the prefill buckets; by default {listed(DEFAULT_PREFILL)} on a CPU, "
    f"{listed(budget.PREFILL)} on a GPU, and larger ones on Hopper.",
)
@click.option(
    "--verify",
    help="Buckets that verify drafts, as ROWS:DRAFTS, e.g. 1:3,8:2; by default they follow from "
    "--drafts and --max-seqs.",
)
@click.option(
    "--max-context",
    type=int,
    help=f"Tokens of the longest sequence; by default the model's, up to {budget.MAX_CONTEXT} on a "
    f"GPU and {CPU_MAX_CONTEXT} on a CPU.",
)
@click.option(
    "--rope-scaling",
    metavar="yarn:N|JSON",
    help="Extend the model's positions N times by YaRN, which changes short texts a little; or "
    "rope_scaling as JSON, in place of the checkpoint's.",
)
@click.option(
    "--max-seqs",
    type=int,
    help=f"Concurrent sequences; by default {budget.MAX_SEQS} on a GPU (fewer if their states do "
    f"not fit), and {CPU_MAX_SEQS} on a CPU.",
)
@click.option(
    "--kv-tokens",
    type=int,
    help="Tokens in the KV pages, all sequences together; by default as many as the GPU's memory "
    f"holds, or {KV_BUDGET >> 30} GiB of them on a CPU.",
)
@click.option(
    "--cache-gib",
    type=float,
    help="GiB for snapshots of the prefix cache, 0 for none. On a GPU this memory is taken from "
    f"the KV pages, by default at most 1/{budget.CACHE} of it; on a CPU by default at most "
    f"{budget.CPU_CACHE >> 30}.",
)
@click.option(
    "--kv-dtype",
    default="auto",
    shell_complete=_one_of(*KV_DTYPES),
    help=f"Type of keys and values: {', '.join(KV_DTYPES)}; auto: the checkpoint's, else f32 on a "
    "CPU and bf16 on a GPU.",
)
@click.option(
    "--state-dtype",
    default="auto",
    shell_complete=_one_of(*STATE_DTYPES),
    help=f"Type of recurrent states: {', '.join(STATE_DTYPES)}; auto: f16 if the card's memory is "
    "slow (GB10), else the checkpoint's, else f32.",
)
@click.option(
    "--mlp-activations",
    default="auto",
    type=click.Choice(MLP_ACTIVATIONS),
    help="How prefill multiplies dense NVFP4 MLPs: bf16, activations as they are (W4A16); fp8, "
    "weights and activations rounded to e4m3 (W4A8); auto: fp8 on a GPU without --invariant.",
)
@click.option(
    "--gdn-ring",
    type=int,
    help="Tokens after which a recurrent state is rewritten, 0: every token; by default "
    f"{GDN_RING} on a GPU or with drafts, else 0.",
)
@click.option(
    "--drafts",
    default="auto",
    help="Most draft tokens of a round, 0 for none; auto: 3 on a GPU, if there is a draft head.",
)
@click.option(
    "--draft-dtype",
    default="auto",
    shell_complete=_one_of(*DTYPES),
    help=f"How the draft head is stored: {', '.join(DTYPES)}; auto: nvfp4 if a GPU's model is.",
)
@click.option(
    "--draft-vocab",
    default="auto",
    metavar="full|auto|list|N|FILE",
    help="Ids that are drafted: all, a list of frequent ones, the first N, or those of a file; "
    "auto: the list if the GPU's memory is slow. The generated tokens stay the same.",
)
@click.option(
    "--drafter",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of a DFlash2 drafter that was trained for this model: it drafts all tokens of a "
    "round in one pass. Rounds of few drafts stay with the model's draft head, if it has one.",
)
@click.option(
    "--draft-suffix",
    type=int,
    default=0,
    metavar="N",
    help="Also draft by copying: if the last N tokens or more occurred before, draft what followed "
    "them. It needs no draft head; 6 is a good N, 0 (the default) turns it off.",
)
@click.option("--no-fuse", is_flag=True, help="Apply no fusion.")
@click.option("--debug", is_flag=True, help="Add every layer's output to the engine's outputs.")
@click.option(
    "--timing/--no-timing",
    default=None,
    help="Time tactics on this machine's GPU; by default if it is the target.",
)
@click.option(
    "--invariant",
    is_flag=True,
    help="Give a sequence the same bits in any batch, and with any part of it cached (not for "
    "--target rtx).",
)
@click.option(
    "--vision/--no-vision",
    default=True,
    help="Build the vision tower, if the checkpoint has one and the target has its kernels.",
)
@click.option(
    "--max-image-pixels",
    type=int,
    metavar="N",
    help="Area of the largest image; larger ones are resized. By default "
    f"{images.MOST_PIXELS} on a GPU, {images.CPU_MOST_PIXELS} on a CPU.",
)
@click.option(
    "--tp",
    type=int,
    default=1,
    show_default=True,
    help="Ranks that share the model, each on its own GPU.",
)
@click.option(
    "--across-hosts",
    is_flag=True,
    help="With --tp: the GPUs are in several hosts, which NCCL connects (extra nccl).",
)
@click.option(
    "--record/--no-record",
    default=None,
    help="Run every bucket once, if this machine can, and keep md5 sums of its tokens; on a CPU by "
    "default only the smallest bucket of each family.",
)
@click.option("--list", "lists", is_flag=True, help="Print which checkpoint fits which machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, or the list, as JSON.")
@click.version_option(package_name="spark-engine", prog_name="spark-build")
def main(
    checkpoint: Path | None,
    output: Path | None,
    executor: str,
    target: str,
    no_fuse: bool,
    record: bool | None,
    lists: bool,
    as_json: bool,
    device: int | None,
    **rest: Any,
) -> None:
    """Compiles the Hugging Face folder CHECKPOINT into an engine folder.

    CHECKPOINT may also name a model on the hub, OWNER/NAME or OWNER/NAME@REVISION (or be its
    address there): it is fetched first. The default output is engines/ and the checkpoint's name.
    """
    if lists:
        whole = checkpoint_list.listed()
        lines = checkpoint_list.lines(whole)
        click.echo(json.dumps(whole, indent=1, ensure_ascii=False) if as_json else "\n".join(lines))
        return
    if checkpoint is None:
        raise click.UsageError("Missing argument 'CHECKPOINT'; --list names some.")
    hub = name_of(checkpoint)
    name = hub.partition("@")[0].rpartition("/")[2] if hub else checkpoint.resolve().name
    folder = output or Path("engines") / name
    gc.set_threshold(*COLLECTIONS)
    with command("spark-build"):
        choose(os.environ, device)
        given = {
            name: parse(rest[name]) for name, parse in PARSERS.items() if rest[name] is not None
        }
        options = Options(target_for(executor, target), fuse=not no_fuse, **{**rest, **given})
        with Progress(sys.stderr) as shown:
            if hub is not None:
                gpu_of(options)  # a wrong option is reported before a download
                check_destination(folder)
                described = partial(read_description, rope_scaling=options.rope_scaling)
                checkpoint = fetch(hub, shown, described, folder)
            report = build(checkpoint, folder, options, shown.say, shown.advance, record)
        if as_json:
            click.echo(json.dumps(report_json(report), indent=1, sort_keys=True))
        else:
            here, text = runs_here(report.manifest.target), has_text(folder)
            show_report(Console(), report, str(folder), here, text)


if __name__ == "__main__":
    main()
