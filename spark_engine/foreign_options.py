"""Options of other servers' command lines, and what does the same here.

Knows names of options only. `docs/start/other_servers.md` shows the same table.
"""

from collections.abc import Mapping
from types import MappingProxyType

_SIZES = "memory is planned by spark-build: --kv-tokens, --max-seqs, --cache-gib"
_CONTEXT = "spark-build --max-context sets the context; spark-run --max-model-len lowers it"
_ROPE = "spark-build --rope-scaling extends the context; what else config.json says is edited there"
_TYPE = "an engine keeps the types of its checkpoint; spark-build --kv-dtype, --state-dtype"
_DRAFTS = "spark-build --drafts builds them in; spark-run --drafts lowers their number"
_RANKS = "spark-build --tp N; spark-run takes N from the engine"
_REASONING = "spark-run --reasoning"
_PREFILL = "spark-run --policy latency, balanced or throughput; spark-run --itl-ms"
_NAME = "the engine folder or OWNER/NAME is the first argument, without an option"
# {option: what to use}, of vLLM, SGLang, llama.cpp and TensorRT-LLM
FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "--gpu-memory-utilization": _SIZES,
        "--mem-fraction-static": _SIZES,
        "--kv-cache-free-gpu-memory-fraction": _SIZES,
        "--swap-space": "swapped sequences need no option",
        "--cpu-offload-gb": "an engine must fit the GPU: choose a smaller checkpoint",
        "--n-gpu-layers": "an engine is on the GPU as a whole, or on the CPU (--target cpu)",
        "--max-num-seqs": "spark-build --max-seqs",
        "--max-running-requests": "spark-build --max-seqs",
        "--parallel": "spark-build --max-seqs",
        "--max-num-batched-tokens": _PREFILL,
        "--long-prefill-token-threshold": _PREFILL,
        "--chunked-prefill-size": _PREFILL,
        "--enable-chunked-prefill": "prefill is always chunked",
        "--max-model-len": _CONTEXT,
        "--context-length": _CONTEXT,
        "--ctx-size": _CONTEXT,
        "--hf-overrides": _ROPE,
        "--json-model-override-args": _ROPE,
        "--rope-scaling": _ROPE,
        "--rope-scale": _ROPE,
        "--yarn-orig-ctx": _ROPE,
        "--tensor-parallel-size": _RANKS,
        "--tp-size": _RANKS,
        "--data-parallel-size": "spark-replicas places several servers: docs/operate/scaling.md",
        "--kv-cache-dtype": "spark-build --kv-dtype",
        "--dtype": _TYPE,
        "--quantization": _TYPE,
        "--speculative-config": _DRAFTS,
        "--speculative-algorithm": _DRAFTS,
        "--num-speculative-tokens": _DRAFTS,
        "--enable-prefix-caching": "the prefix cache is on; spark-run --cache-gib 0 turns it off",
        "--no-enable-prefix-caching": "spark-run --cache-gib 0",
        "--disable-radix-cache": "spark-run --cache-gib 0",
        "--enforce-eager": "spark-run --no-graphs",
        "--disable-cuda-graph": "spark-run --no-graphs",
        "--enable-auto-tool-choice": "tool calls are on; spark-run --tools names their form",
        "--tool-call-parser": "spark-run --tools",
        "--reasoning-parser": _REASONING,
        "--enable-reasoning": _REASONING,
        "--reasoning-format": _REASONING,
        "--default-chat-template-kwargs": "spark-run --chat-template-kwargs",
        "--chat-template": "an engine has its checkpoint's template, in its folder tokenizer/",
        "--jinja": "chat templates are always used",
        "--model": _NAME,
        "--model-path": _NAME,
        "--hf-repo": _NAME,
        "--served-model-name": "spark-run --served-model-name",
        "--alias": "spark-run --served-model-name",
        "--trust-remote-code": "no code of a checkpoint is run",
        "--api-server-count": "spark-replicas places several servers: docs/operate/scaling.md",
        "--allowed-origins": "spark-run --cors-origin",
        "--ssl-certfile": "spark-run --tls-cert",
        "--ssl-keyfile": "spark-run --tls-key",
        "--uvicorn-log-level": "spark-run --log-level",
        "--disable-log-requests": "spark-run logs requests only with --access-log",
        "--scheduling-policy": "spark-run --allow-priority",
    }
)


def explain(option: str) -> str:
    """A sentence about what does the same here as `option` elsewhere; empty if it is unknown."""
    words = FOREIGN.get(option.partition("=")[0].replace("_", "-"), "")
    return f" Here: {words}." if words else ""
