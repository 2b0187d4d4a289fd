"""Model folders: config, safetensors headers, the tensor table and the placement on ranks."""
