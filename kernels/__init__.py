"""CUDA C++ kernels, their C ABI and the host emulation that runs the same source without a GPU."""

if __name__ != "pagefuzz.kernels":
    # As a top-level module it would shadow other people's packages of that name.
    raise ImportError(f"import pagefuzz.kernels, not {__name__}")
