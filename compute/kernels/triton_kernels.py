"""All Triton kernels under the names their torch references have in `reference`."""

from __future__ import annotations

from compute.kernels.ask import ask, await_rows, tell
from compute.kernels.attention import attend
from compute.kernels.begin import begin_token
from compute.kernels.compressor import compress_step, index_key_step
from compute.kernels.dense import bf16_matvec, fp8_gate_up, fp8_matvec, fp8_matvec_to_streams
from compute.kernels.engram import engram_add
from compute.kernels.experts import experts_down, experts_gate_up
from compute.kernels.hyper_connections import mix_dot, mix_finish, post
from compute.kernels.indexer import (
    choose_blocks,
    choose_rows,
    index_queries,
    index_scores,
)
from compute.kernels.normed import normed_bf16_matvec, normed_fp8_matvec
from compute.kernels.norms import finish_query_kv, quantize, rms_norm
from compute.kernels.router import route

__all__ = [
    "ask",
    "attend",
    "await_rows",
    "begin_token",
    "bf16_matvec",
    "choose_blocks",
    "choose_rows",
    "compress_step",
    "engram_add",
    "experts_down",
    "experts_gate_up",
    "finish_query_kv",
    "fp8_gate_up",
    "fp8_matvec",
    "fp8_matvec_to_streams",
    "index_key_step",
    "index_queries",
    "index_scores",
    "mix_dot",
    "mix_finish",
    "normed_bf16_matvec",
    "normed_fp8_matvec",
    "post",
    "quantize",
    "rms_norm",
    "route",
    "tell",
]
