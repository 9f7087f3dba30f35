"""fp8lab: a laboratory for FP8 training.

`fp8lab.emulation` says which bits are right (NumPy only), `fp8lab.kernels` are the Triton kernels
held to those bits, `fp8lab.testing` is the kit that compares them, and `fp8lab.experiments` runs
the sweeps. Importing this package loads none of them, and never torch.
"""

__version__ = "0.1.0"
