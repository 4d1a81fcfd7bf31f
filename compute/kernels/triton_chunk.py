"""Triton kernels over many tokens, under the names of the torch functions they stand in for."""

from __future__ import annotations

from compute.kernels.chunk_attention import rotate_tail, sparse_attention
from compute.kernels.chunk_dense import dequantize_fp8_weight, round_trip_fp8
from compute.kernels.chunk_index import (
    candidate_blocks,
    choose_rows,
    index_queries,
    masked_scores,
)
from compute.kernels.chunk_streams import collapse_norm, mixes, write_back
from compute.kernels.grouped_experts import routed_experts

__all__ = [
    "candidate_blocks",
    "choose_rows",
    "collapse_norm",
    "dequantize_fp8_weight",
    "index_queries",
    "masked_scores",
    "mixes",
    "rotate_tail",
    "round_trip_fp8",
    "routed_experts",
    "sparse_attention",
    "write_back",
]
