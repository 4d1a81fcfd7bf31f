"""The names of every figure, so that all processes, summaries and dashboards use the same words.

Precision is `predicted_used / predicted_issued`; recall is
`predicted_used / (predicted_used + demand_misses)`. An early prediction counts as used.
"""

from __future__ import annotations

# Expert service
DEMAND_HITS = "demand_hits"  # picks found resident when their layer was routed
DEMAND_MISSES = "demand_misses"  # picks that compute had to wait for
PREDICTED_ISSUED = "predicted_issued"  # predicted experts whose read was started
PREDICTED_USED = "predicted_used"  # of those, demanded after they landed and before eviction
PREDICTED_LATE = "predicted_late"  # of those, demanded while still being read (a miss too)
PREDICTED_DROPPED = "predicted_dropped"  # predictions cancelled before their read was started
PREDICTED_WASTED_BYTES = "predicted_wasted_bytes"  # bytes read for predictions evicted unused
HARMFUL_EVICTIONS = "harmful_evictions"  # evicted for a prediction, then demanded
READS_URGENT = "reads_urgent"  # experts read in each lane
READS_PREDICTED = "reads_predicted"
READS_BACKGROUND = "reads_background"
READ_BYTES = "read_bytes"
READ_SECONDS = "read_seconds"  # summed over readers
READ_FAILURES = "read_failures"
QUEUE_DEPTH = "queue_depth"
QUEUE_DEPTH_MAX = "queue_depth_max"
RESIDENT_EXPERTS = "resident_experts"
EVICTIONS = "evictions"
READERS_REPLACED = "readers_replaced"
# Engram service
ENGRAM_ROWS = "engram_rows"  # rows asked for
ENGRAM_ROWS_READ = "engram_rows_read"  # rows read from the file, duplicates once
ENGRAM_CACHE_HITS = "engram_cache_hits"
ENGRAM_READ_BYTES = "engram_read_bytes"
ENGRAM_READ_SECONDS = "engram_read_seconds"
# Compute
DEVICE_HITS = "device_hits"  # picks of decode steps found in device memory
DEVICE_COPIES = "device_copies"  # experts copied from the arena into device memory
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
