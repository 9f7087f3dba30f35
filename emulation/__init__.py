"""The oracle: FP8 training's arithmetic in NumPy, bit for bit. It never loads torch or Triton."""
