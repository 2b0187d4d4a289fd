"""What the engine is compared with: random checkpoints, NumPy sentences and transformers in float64."""
