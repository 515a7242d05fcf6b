"""The benchmark: kernels and whole decode steps, timed in turns beside what PyTorch and Transformers offer."""
