"""Which experts are in memory, and the processes that read them there: residency, service, readers.

The decisions (slices, policy, slots, reads, residency) know no socket, file or clock.
"""
