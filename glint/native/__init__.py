"""The native engine: a mirror of the C header and the loaded library."""
