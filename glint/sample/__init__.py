"""The sample model: SmolLM2-135M-Instruct as a GLM-4.x MoE folder, made from a package on PyPI."""
