"""What the launchers of Triton kernels share."""
