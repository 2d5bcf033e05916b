"""The worker: leases jobs from queues, runs them in slots, keeps their leases and reports their ends."""
