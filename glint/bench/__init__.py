"""Benches: figures with units, beside the machine's own ceiling and beside a peer."""
