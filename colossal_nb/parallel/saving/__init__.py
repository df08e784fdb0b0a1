"""The parts of a checkpoint.

What a run is made of (`contents`, `draft`), how it lies on disk (`folder`, `shards`, `values`), the way back
(`fitting`, `fill`).
"""
