"""Benches: figures with units, beside the machine's measured peak bandwidth and beside a peer."""
