"""What `glint check --gpu` says of the machine's GPUs, and its self-test of the CUDA engine."""
