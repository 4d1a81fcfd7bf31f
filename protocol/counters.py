"""The names of every figure, so that all processes, summaries and dashboards use the same words,
and what each counter counts, for `/metrics`.

Precision is `predicted_used / predicted_issued`; recall is
`predicted_used / (predicted_used + demand_misses)`. An early prediction counts as used.
"""

from __future__ import annotations

# Expert service
DEMAND_HITS = "demand_hits"
DEMAND_MISSES = "demand_misses"
PREDICTED_ISSUED = "predicted_issued"
PREDICTED_USED = "predicted_used"
PREDICTED_LATE = "predicted_late"
PREDICTED_DROPPED = "predicted_dropped"
PREDICTED_WASTED_BYTES = "predicted_wasted_bytes"
HARMFUL_EVICTIONS = "harmful_evictions"
READS_URGENT = "reads_urgent"
READS_PREDICTED = "reads_predicted"
READS_BACKGROUND = "reads_background"
READ_BYTES = "read_bytes"
READ_SECONDS = "read_seconds"
READ_FAILURES = "read_failures"
QUEUE_DEPTH = "queue_depth"
QUEUE_DEPTH_MAX = "queue_depth_max"
RESIDENT_EXPERTS = "resident_experts"
EVICTIONS = "evictions"
READERS_REPLACED = "readers_replaced"
# A reader
READS = "reads"
# Engram service
ENGRAM_ROWS = "engram_rows"
ENGRAM_ROWS_READ = "engram_rows_read"
ENGRAM_CACHE_HITS = "engram_cache_hits"
ENGRAM_READ_BYTES = "engram_read_bytes"
ENGRAM_READ_SECONDS = "engram_read_seconds"
# Compute
DEVICE_HITS = "device_hits"
DEVICE_COPIES = "device_copies"
HINTS_DROPPED = "hints_dropped"
STALL_EXPERT_S = "stall_expert_s"
STALL_ENGRAM_S = "stall_engram_s"
TTFT_S = "ttft_s"
PREFILL_S = "prefill_s"
DECODE_S = "decode_s"
TOKENS_PER_S = "tokens_per_s"
STEPS = "steps"
# Every process
MALFORMED_MESSAGES = "malformed_messages"

MEANINGS = {
    DEMAND_HITS: "Picks found resident when their layer was routed",
    DEMAND_MISSES: "Picks that compute had to wait for",
    PREDICTED_ISSUED: "Predicted experts whose read was started",
    PREDICTED_USED: "Predicted experts demanded after they landed and before eviction",
    PREDICTED_LATE: "Predicted experts demanded while still being read; a miss too",
    PREDICTED_DROPPED: "Predictions given up before their read was started",
    PREDICTED_WASTED_BYTES: "Bytes read for predictions that were evicted unused",
    HARMFUL_EVICTIONS: "Experts evicted for a prediction and then demanded",
    READS_URGENT: "Experts read because compute waited for them",
    READS_PREDICTED: "Experts read because they were predicted",
    READS_BACKGROUND: "Experts read because they were hot when the last run ended",
    READ_BYTES: "Bytes of experts read",
    READ_SECONDS: "Seconds of reading experts, summed over readers",
    READ_FAILURES: "Reads that failed for good",
    QUEUE_DEPTH: "Reads that wait for a reader",
    QUEUE_DEPTH_MAX: "The most reads that have waited for a reader",
    RESIDENT_EXPERTS: "Experts in memory",
    EVICTIONS: "Experts whose slot was taken for another",
    READERS_REPLACED: "Readers that died and were replaced",
    READS: "Read orders carried out",
    ENGRAM_ROWS: "Engram rows asked for",
    ENGRAM_ROWS_READ: "Engram rows read from the file, duplicates once",
    ENGRAM_CACHE_HITS: "Engram rows found in the cache",
    ENGRAM_READ_BYTES: "Bytes of engram rows read, in whole blocks",
    ENGRAM_READ_SECONDS: "Seconds of reading engram rows",
    DEVICE_HITS: "Picks of decode steps found in device memory",
    DEVICE_COPIES: "Experts copied from the arena into device memory",
    HINTS_DROPPED: "Hints that did not fit the expert service's queue",
    STALL_EXPERT_S: "Seconds that compute waited for experts",
    STALL_ENGRAM_S: "Seconds that compute waited for engram rows",
    STEPS: "Passes through the model: a token, or a chunk of a prompt",
    MALFORMED_MESSAGES: "Messages dropped because they made no sense",
}
