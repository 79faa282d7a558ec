"""Memory that buffers of a case lie in, on the host and on a GPU."""
